"""What calls leave behind: looks, changes of one thing, and what only a person should decide."""

import pytest

from replay_pipeline.actions import canonical_action
from replay_pipeline.actions.keys import reach_of
from replay_pipeline.actions.shell import shell_plan

CWD = "/home/ada/shop"


@pytest.mark.parametrize(
    "command",
    [
        *("ls -la src", "cat a.py | head -5", "cd web && git status 2>&1", "sed -n '10,40p' a.py"),
        *("git log --oneline -5; git diff --stat", "grep -rn cart src > /dev/null", "timeout 20 rg cart"),
        *("find . -name '*.py' | xargs grep -n cart", "for f in a b; do wc -l $f; done"),
        *("if [ -f a ]; then cat a; fi", "echo $(git rev-parse HEAD)", "gh pr view 12 --json title"),
        "awk '{print $1}' a.txt | sort | uniq -c | sort -rn",
    ],
)  # fmt: skip
def test_commands_that_only_look(command):
    assert shell_plan(command, CWD).only_looks


@pytest.mark.parametrize(
    "command",
    [
        *("echo x > a.txt", "sed -i s/a/b/ a.txt", "sed -n 'w out.txt' a.txt", "sort -uo a.txt a.txt"),
        *("find . -name x -delete", "find . | xargs rm", "git branch cart", "git stash", "ls; make"),
        *("gh api -X POST repos/a/b/issues", "awk '{print > \"x\"}' a.txt", "echo $(rm a.txt)"),
        *("uniq a.txt b.txt", "cat <<E\n$(rm a.txt)\nE", "while true; do rm a; done", "mytool show"),
        *("echo 'unclosed", "f() { ls; }"),
    ],
)  # fmt: skip
def test_commands_that_may_change_something(command):
    assert not shell_plan(command, CWD).only_looks


@pytest.mark.parametrize(
    ("command", "acts"),
    [
        ("git add -A && git commit -m x && git push --force", {"commit", "push", "force"}),
        ("rm -rf build", {"delete"}),
        ("find . -name '*.pyc' -delete", {"delete"}),
        ("find . -name '*.pyc'", set()),
        ("git reset --hard HEAD~1", {"discard"}),
        ("git reset HEAD a.py", set()),
        ("git checkout -- a.py", {"discard"}),
        ("git checkout -b cart", set()),
        ("git branch -D cart", {"delete"}),
        ("git branch", set()),
        ("ls build | xargs rm -f", {"delete"}),
        ("timeout 9 npm publish", {"publish"}),
        ("gh pr create --fill", {"publish"}),
        ("git stash pop", set()),
        ("echo git push", set()),
        ("git log --grep push", set()),
    ],
)
def test_consequences_that_a_person_asks_for(command, acts):
    assert shell_plan(command, CWD).acts == acts


def reach(name, **arguments):
    message = {"tool_calls": [{"function": {"name": name, "arguments": arguments}}]}
    return reach_of(canonical_action(message, cwd=CWD).calls[0])


def test_reach_of_tools():
    assert reach("Read", file_path="a.py") == "look"
    assert reach("Bash", command="ls") == "look"
    assert reach("Bash", command="make") == "anything"
    assert reach("Write", file_path="a.py", content="x") == "object"
    assert reach("WebSearch", query="x") == "nothing"
    assert reach("mcp__browser__browser_snapshot") == "look"
    assert reach("mcp__tracker__create_issue", title="x") == "anything"
    assert reach("mcp__forget__all") == "anything"


def test_a_foreign_tool_only_looks_where_its_annotations_say_so():
    def told(name, **hints):
        function = {"name": name, "parameters": {"type": "object"}, "annotations": hints}
        calls = [{"function": {"name": name, "arguments": "{}"}}]
        action = canonical_action({"tool_calls": calls}, tools=[{"function": function}])
        return reach_of(action.calls[0])

    assert told("mcp__search-db__drop_index") == "anything"
    assert told("mcp__pg__query", readOnlyHint=False) == "anything"
    assert told("mcp__pg__tables", readOnlyHint=True) == "look"
