"""Which files a command shows, and that nothing else is taken for such a command."""

import pytest

from replay_pipeline.workspaces.shows import shown_by

P = "/home/mira/tide"


@pytest.mark.parametrize(
    ("command", "files", "folders", "commits"),
    [
        ("cat -n tide/high.py", {f"{P}/tide/high.py"}, set(), set()),
        ("cd tide && head -20 high.py; tail -n5 ../low.py", {f"{P}/tide/high.py", f"{P}/low.py"}, set(), set()),
        ("sed -n '10,20p' \"a b.py\" | grep -c -e x 2>/dev/null", {f"{P}/a b.py"}, set(), set()),
        (r'grep -n -A2 "a\|b$" x.py y.py', {f"{P}/x.py", f"{P}/y.py"}, set(), set()),
        ("grep -rn 'x' --include='*.py' src | sort | uniq -c", set(), {f"{P}/src"}, set()),
        ("wc -l tide/*.py", set(), {f"{P}/tide"}, set()),
        ("cat *.py | head -3", set(), {P}, set()),
        ("pwd", set(), set(), set()),
        ("ls tide | head -3; ls -1", set(), {P, f"{P}/tide"}, set()),
        ("git show abcdef1:tide/high.py | head -3", set(), set(), {"abcdef1:tide/high.py"}),
        ("git log --oneline -3 HEAD", set(), set(), {"HEAD"}),
        ("git diff abcdef1~2..abcdef2^ -- tide | tr -d '\\r'", set(), set(), {"abcdef1~2", "abcdef2^"}),
    ],
)  # fmt: skip
def test_a_command_tells_which_files_and_commits_it_shows(command, files, folders, commits):
    shown = shown_by(command, P)
    assert shown is not None
    assert (shown.files, shown.folders, shown.commits) == (files, folders, commits)


@pytest.mark.parametrize(
    "command",
    [
        *("rm a.py", "cat a.py > b.py", "cat < a.py", "cat a.py; rm a.py", "cat $HOME/a", "cat ~/a"),
        *("cat `ls`", "cat $(ls)", 'cat "$(ls)"', "cat <(ls)", "X=1 cat a.py", "cat {a,b}.py", "cat a.py &"),
        *("tail -f a.py", "sort -o a.py b.py", "sort --output=a.py b.py", "grep -f a.py b.py", "cat"),
        *("head -n", "find . -delete", "ls -l", "xargs cat", "sh -c 'cat a.py'", "cat a.py\nrm a.py"),
        *("date", "curl http://localhost", "cd ..", "echo x"),
        *("git status", "git log main", "git diff", "git show abcdef1 --output=a.py", "git -C / log", "git push"),
        *("git log --format=%cr", "git diff HEAD", "git blame a.py"),
    ],
)  # fmt: skip
def test_what_may_do_or_show_anything_else_is_not_such_a_command(command):
    assert shown_by(command, P) is None


def test_programs_that_fill_up_numbers_otherwise_on_a_mac_are_unknown_there():
    assert shown_by("wc a.py", P)
    for command in ("wc a.py", "nl a.py", "sort a.py | uniq -c"):
        assert shown_by(command, "/Users/mira/tide") is None
