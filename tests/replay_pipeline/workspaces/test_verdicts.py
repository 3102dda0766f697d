"""Candidates are judged on the rebuilt tree of a real session: who would fail, and who does the same."""

from contextlib import closing, contextmanager

import pytest

from replay_pipeline.workspaces.git import Repository
from replay_pipeline.workspaces.history import History
from replay_pipeline.workspaces.logs import read_log
from replay_pipeline.workspaces.sandbox import CommandLimits, Ran
from replay_pipeline.workspaces.verdicts import CheckedFiles, Judge, StatePlace, TriedCall
from tests.support.worked import Worked

FILES = {
    "tide/high.py": "def high():\n    return 3\n",
    "tide/low.py": "def low():\n    return 1\n",
    "test_tide.py": "from tide.high import high\nassert high() == 4\n",
}


@contextmanager
def at_last_state(tmp_path, work):
    path = work.session.write(tmp_path / "projects")
    log = read_log([path])
    with closing(Repository(work.root)) as repository:
        history = History(repository, log)
        for order, step in enumerate(log.steps[:-1]):
            history.enter(order, step)
            history.take(step)
        last = len(log.steps) - 1
        history.enter(last, log.steps[last], is_own_used=True)
        yield StatePlace(history, log.steps[last])


@pytest.fixture
def work(open_path):
    work = Worked(open_path / "tides")
    work.begin(FILES)
    work.read("tide/high.py")
    work.read("test_tide.py")
    work.edit("tide/high.py", "return 3", "return 4")
    return work


def edit(work, old, new, name="tide/high.py"):
    return TriedCall(
        "Edit", {"file_path": str(work.root / name), "old_string": old, "new_string": new}
    )


def test_wrong_answers_made_by_rule_fail_with_their_kind_and_the_recorded_one_works(tmp_path, work):
    high = str(work.root / "tide" / "high.py")
    wrong = {
        "string_not_found": [edit(work, "return 30", "return 4")],
        "not_found": [TriedCall("Read", {"file_path": high.replace("high", "hihg")})],
        "not_read_yet": [edit(work, "return 1", "return 2", "tide/low.py")],
        "no_change": [edit(work, "return 3", "return 3")],
        "is_directory": [TriedCall("Read", {"file_path": str(work.root / "tide")})],
    }
    judge = Judge("files")
    with at_last_state(tmp_path, work) as place:
        for kind, calls in wrong.items():
            verdict = judge.judge(place, calls)
            assert (verdict.status, verdict.error_kind) == ("fails", kind)
            assert verdict.effect is None
        right = judge.judge(place, [edit(work, "return 3", "return 4")])
        twice = [edit(work, "return 3", "return 4"), edit(work, "return 3", "return 4")]
        assert judge.judge(place, twice).error_kind == "string_not_found"
    assert (right.status, right.changed) == ("works", (high,))


def test_other_words_with_the_same_files_afterwards_have_one_effect(tmp_path, work):
    path = str(work.root / "tide" / "high.py")
    after = "def high():\n    return 4\n"
    same = [
        [edit(work, "return 3", "return 4")],
        [edit(work, "def high():\n    return 3", "def high():\n    return 4")],
        [TriedCall("Write", {"file_path": path, "content": after})],
        [edit(work, "return 3", "return 5"), edit(work, "return 5", "return 4")],
    ]
    other = [
        [edit(work, "return 3", "return 5")],
        [TriedCall("Write", {"file_path": path, "content": after.rstrip()})],
    ]
    judge = Judge("files")
    with at_last_state(tmp_path, work) as place:
        effects = {judge.judge(place, calls).effect for calls in same}
        others = {judge.judge(place, calls).effect for calls in other}
        looking = judge.judge(place, [TriedCall("Read", {"file_path": path})])
    assert len(effects) == 1
    assert len(others | effects) == 3
    assert (looking.status, looking.effect) == ("works", None)


def test_nothing_is_executed_unless_the_setting_says_so(tmp_path, work):
    calls = [edit(work, "return 30", "return 4")]
    command = [TriedCall("Bash", {"command": "touch /tmp/was-here"})]
    with at_last_state(tmp_path, work) as place:
        assert Judge("off").judge(place, calls).status == "not_known"
        assert Judge("files").judge(place, command).status == "not_known"
        assert Judge("files").judge(place, [TriedCall("WebFetch", {})]).status == "not_known"
    with pytest.raises(ValueError, match="sandbox"):
        Judge("commands")


def test_commands_have_one_effect_if_it_shows_and_is_the_same_twice(tmp_path, work, box):
    judge = Judge("commands", sandbox=box)

    def effect(command):
        return judge.judge(place, [TriedCall("Bash", {"command": command})]).effect

    with at_last_state(tmp_path, work) as place:
        assert effect("cat tide/high.py") == effect("sed -n p tide/high.py") is not None
        assert effect("cat tide/high.py") != effect("cat tide/low.py")
        assert effect("rm tide/high.py") == effect("unlink tide/high.py") is not None
        # Nobody can tell by it what they looked for.
        assert effect("grep -c nowhere tide/high.py | grep 1") is None
        assert effect("grep -q nowhere tide/high.py") is None
        assert effect("cat /proc/sys/kernel/random/uuid") is None
        assert effect("head -c 8 /dev/urandom | base64 > new.txt") is None


def test_a_command_is_tried_on_the_files_of_the_state_and_not_again(tmp_path, work, box):
    tests = TriedCall("Bash", {"command": "python3 test_tide.py"})
    kept = tmp_path / "runs.sqlite"
    judge = Judge("commands", sandbox=box, kept=kept)
    with at_last_state(tmp_path, work) as place:
        before = judge.judge(place, [tests])
        after = judge.judge(place, [edit(work, "return 3", "return 4"), tests])
        by_sed = TriedCall("Bash", {"command": "sed -i 's/return 3/return 4/' tide/high.py"})
        swapped = judge.judge(place, [by_sed])
        n_run = judge.n_run
        again = Judge("commands", sandbox=box, kept=kept)
        assert again.judge(place, [tests]) == before
        assert again.n_run == 0
    assert n_run == 3
    assert "AssertionError" in before.answer
    assert "AssertionError" not in after.answer
    assert swapped.changed == (str(work.root / "tide" / "high.py"),)
    assert work.tree()["tide/low.py"] == FILES["tide/low.py"]


CHECK = "python3 test_tide.py"


def test_the_check_of_a_project_runs_before_and_after_what_changes_files(tmp_path, work, box):
    checks = {str(work.root): CHECK}
    kept = tmp_path / "runs.sqlite"
    judge = Judge("commands", sandbox=box, kept=kept, checks=checks)
    with at_last_state(tmp_path, work) as place:
        fixed = judge.judge(place, [edit(work, "return 3", "return 4")])
        still = judge.judge(place, [edit(work, "return 3", "return 5")])
        looked = judge.judge(place, [TriedCall("Read", {"file_path": str(work.root / "low.py")})])
        twice = [edit(work, "return 3", "return 4"), edit(work, "return 4", "return 3")]
        nothing = judge.judge(place, twice)
        n_run = judge.n_run
        by_sed = TriedCall("Bash", {"command": "sed -i s/3/4/ tide/high.py"})
        assert judge.judge(place, [by_sed]).checked == CheckedFiles(False, True)
        assert judge.n_run == n_run + 1  # the command; the files afterwards were checked before
        broken = judge.judge(
            place,
            [edit(work, "return 3", "return 4"), TriedCall("Bash", {"command": "rm -r tide"})],
        )
        assert Judge("files", checks=checks).judge(place, [by_sed]).checked is None
    assert fixed.checked == CheckedFiles(False, True)
    assert still.checked == CheckedFiles(False, False)
    assert looked.checked is None is nothing.checked
    assert broken.checked == CheckedFiles(False, False)
    assert fixed.diff.split("\n")[:2] == ["--- tide/high.py", "+++ tide/high.py"]
    assert "-    return 3\n+    return 4" in fixed.diff
    assert "--- tide/low.py\n+++ /dev/null" in broken.diff


class Told:
    """A box in which checks end as told, one after the other."""

    name, limits = "told", CommandLimits()

    def __init__(self, *statuses):
        self.statuses = list(statuses)

    def run(self, command, **place):
        return Ran(self.statuses.pop(0), "", {})


@pytest.mark.parametrize(
    ("statuses", "checked"),
    [
        ((1, 1), CheckedFiles(False, False)),
        ((1, 0, 1, 0), CheckedFiles(False, True)),
        ((0, 2, 0, 2), CheckedFiles(True, False)),
        ((1, 0, 1, 1), None),
        ((1, 0, 0, 0), None),
        ((1, None, 1, None), None),
    ],
)
def test_a_check_that_says_now_this_and_now_that_says_nothing(tmp_path, work, statuses, checked):
    box = Told(*statuses)
    judge = Judge("commands", sandbox=box, checks={str(work.root): CHECK})
    with at_last_state(tmp_path, work) as place:
        assert judge.judge(place, [edit(work, "return 3", "return 4")]).checked == checked
    assert box.statuses == []


def test_commands_of_git_see_the_commit_and_the_changes_of_the_state(tmp_path, work, box):
    work.session.wait(10)
    work.bash("git status --short; git diff; git log --format=%s%d")
    recorded = read_log([work.session.write(tmp_path / "there")]).steps[-1].text
    with at_last_state(tmp_path, work) as place:
        judge = Judge("commands", sandbox=box)
        command = "git status --short; git diff; git log --format=%s%d"
        verdict = judge.judge(place, [TriedCall("Bash", {"command": command})])
    assert verdict.answer.strip() == recorded.strip()


def test_a_branch_stands_where_it_stood_then_and_not_at_what_was_merged_into_it(
    tmp_path, work, box
):
    command = (
        "git log main..HEAD --oneline; git merge-base main HEAD; git show --stat --oneline HEAD"
    )
    work.git("checkout", "-q", "-b", "tide")
    work.session.wait(10)
    work.put({"tide/mean.py": "def mean():\n    return 2\n"})
    work.commit("Add the mean")
    work.session.wait(10)
    work.session.git_branch = "tide"
    work.bash(command)
    recorded = read_log([work.session.write(tmp_path / "there")]).steps[-1].text
    assert "Add the mean" in recorded
    work.session.wait(10)
    work.git("checkout", "-q", "main")
    work.git("merge", "-q", "--no-ff", "-m", "Merge branch 'tide'", "tide")
    work.git("branch", "-D", "tide")
    with at_last_state(tmp_path, work) as place:
        verdict = Judge("commands", sandbox=box).judge(
            place, [TriedCall("Bash", {"command": command})]
        )
    assert verdict.answer.strip() == recorded.strip()
