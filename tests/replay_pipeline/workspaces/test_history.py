"""Rebuilt trees are held to what lay on disk when the session was recorded."""

import json
from contextlib import closing, contextmanager

import pytest

from replay_pipeline.settings import Settings
from replay_pipeline.stages.work.workspaces import Workspaces
from replay_pipeline.workspaces.git import Repository
from replay_pipeline.workspaces.history import History
from replay_pipeline.workspaces.logs import read_log
from tests.support.worked import Worked

FILES = {
    "README.md": "# Tides\n",
    "tide/high.py": "def high():\n    return 3\n",
    "tide/low.py": "def low():\n    return 1\n",
    "tests/test_tide.py": "from tide.high import high\n",
}


def worked(tmp_path, name="worked", folder="tides"):
    work = Worked(tmp_path / folder, name)
    work.begin(FILES)
    return work


@contextmanager
def walked(work, tmp_path, *, is_own_used=False, is_later_used=True, repository=None):
    """Give each decision with the rebuilt files before it, by path, and where they come from."""
    path = work.session.write(tmp_path / "projects")
    log = read_log([path])
    with closing(Repository(repository or work.root)) as opened:
        history = History(opened, log, is_later_used=is_later_used)

        def walk():
            for order, step in enumerate(log.steps):
                history.enter(order, step, is_own_used=is_own_used)
                paths = history.below(str(work.root)) or []
                files = {p.removeprefix(f"{work.root}/"): history.file(p) for p in paths}
                yield step, {name: file for name, file in files.items() if file.text is not None}
                history.take(step)

        yield walk()


def texts(files):
    return {name: file.text for name, file in files.items()}


@pytest.mark.parametrize("is_later_used", [True, False])
def test_the_tree_before_each_call_is_the_one_that_lay_on_disk(tmp_path, is_later_used):
    work = worked(tmp_path)
    work.read("tide/high.py")
    work.edit("tide/high.py", "return 3", "return 4")
    work.write("tide/mean.py", "def mean():\n    return 2\n")
    work.session.wait(10)
    work.commit("Raise the tide")
    work.session.wait(60)
    work.bash("git log --oneline")
    work.read("tide/low.py")
    work.edit("tide/low.py", "return 1", "return 0")
    work.read("tide/high.py")
    seen = list(work.before.values())
    with walked(work, tmp_path, is_later_used=is_later_used) as steps:
        found = [texts(files) for _, files in steps]
    assert found == seen
    assert len(found) == 7


def test_a_commit_that_somebody_else_made_between_is_noticed(tmp_path):
    work = worked(tmp_path)
    work.read("tide/high.py")
    work.session.wait(30)
    work.put({"tide/low.py": "def low():\n    return -1\n"})
    work.commit("Lower the tide")
    work.session.wait(30)
    work.read("tide/low.py")
    with walked(work, tmp_path, is_later_used=False) as steps:
        found = [texts(files) for _, files in steps]
    assert found == list(work.before.values())


def test_which_branch_it_was_is_decided_by_content(tmp_path):
    work = worked(tmp_path)
    work.git("checkout", "-q", "-b", "other")
    work.put({"tide/high.py": "def high():\n    return 30\n", "tide/other.py": "x = 1\n"})
    work.session.wait(5)
    work.commit("Try another way")
    work.git("checkout", "-q", "main")
    work.session.wait(60)
    work.session.git_branch = "gone"  # a branch that nobody has kept
    work.read("tide/high.py")
    work.read("tide/low.py")
    with walked(work, tmp_path) as steps:
        found = [texts(files) for _, files in steps]
    assert found[-1] == work.tree()


def test_a_commit_that_a_rebase_made_again_later_counts_from_the_time_of_its_change(tmp_path):
    work = worked(tmp_path)
    work.git("checkout", "-q", "-b", "storm")
    work.put({"tide/high.py": "def high():\n    return 30\n"})
    work.session.wait(5)
    work.commit("Raise the tide")
    work.session.wait(60)
    work.session.git_branch = "storm"
    work.read("tide/high.py")  # nothing was shown before it
    before = work.tree()
    work.session.wait(3600)
    work.git("checkout", "-q", "main")
    work.put({"README.md": "# Tides and storms\n"})
    work.commit("Say more")
    work.git("rebase", "-q", "main", "storm")
    work.git("reflog", "expire", "--expire=now", "--all")
    clone = tmp_path / "clone"
    work.git("clone", "-q", "--bare", str(work.root), str(clone), cwd=tmp_path)
    with walked(work, tmp_path, is_later_used=False, repository=clone) as steps:
        ((_, files),) = steps
    assert texts(files)["tide/high.py"] == before["tide/high.py"]


def test_a_worktree_that_is_gone_is_found_by_the_names_of_its_files(tmp_path):
    work = worked(tmp_path)
    elsewhere = Worked(tmp_path / "away" / "fix", "elsewhere", start="2026-02-03T09:05:00.000Z")
    work.git("worktree", "add", "-q", str(elsewhere.root))
    elsewhere.read("tide/high.py")
    elsewhere.read("tests/test_tide.py")
    elsewhere.edit("tide/high.py", "return 3", "return 5")
    elsewhere.read("tide/high.py")
    seen = list(elsewhere.before.values())
    work.git("worktree", "remove", "--force", str(elsewhere.root))
    with walked(elsewhere, tmp_path, repository=work.root) as steps:
        found = [texts(files) for _, files in steps]
    assert [{k: v for k, v in each.items() if k != ".git"} for each in seen] == found


def test_what_git_itself_has_kept_of_a_checkout_decides_where_nothing_was_shown(tmp_path):
    work = worked(tmp_path)
    work.session.wait(60)
    work.put({"tide/low.py": "def low():\n    return -1\n"})
    work.commit("Lower the tide")
    work.session.wait(60)
    work.read("README.md")  # the same in both commits
    work.session.wait(60)
    work.git("reset", "-q", "--hard", "HEAD~1")  # no branch leads to the commit any more
    work.session.wait(60)
    work.read("README.md")
    with walked(work, tmp_path, is_later_used=False) as steps:
        found = [texts(files) for _, files in steps]
    assert found == list(work.before.values())
    assert found[0] != found[1]


def test_lines_seen_on_one_branch_do_not_bind_the_file_on_another(tmp_path):
    work = worked(tmp_path)
    high = "".join(f"high {n}\n" for n in range(1, 41))
    work.git("checkout", "-q", "-b", "other")
    work.put({"tide/long.txt": high})
    work.commit("Add a long file")
    work.session.git_branch = "other"
    work.session.wait(30)
    work.read("tide/long.txt", offset=2, limit=10)
    work.edit("tide/high.py", "return 3", "return 4")
    work.commit("Raise the tide")
    work.git("checkout", "-q", "main")
    work.put({"tide/long.txt": high.replace("high", "low")})
    work.session.wait(30)
    work.commit("Add another long file")
    work.git("reflog", "expire", "--expire=now", "--all")  # only the branch is known
    work.session.git_branch = "main"
    work.session.wait(30)
    work.read("README.md")
    work.read("tide/low.py")
    with walked(work, tmp_path, is_later_used=False) as steps:
        found = [texts(files) for _, files in steps]
    assert found[2:] == list(work.before.values())[2:]


def test_lines_that_were_shown_of_uncommitted_work_are_in_the_file(tmp_path):
    work = worked(tmp_path)
    long = "".join(f"line {n}\n" for n in range(1, 41))
    work.put({"tide/long.txt": long})
    work.commit("Add a long file")
    work.session.wait(60)
    work.put({"tide/long.txt": long.replace("line 20\n", "line twenty\n")})
    work.read("tide/long.txt", offset=15, limit=10)
    work.read("README.md")
    with walked(work, tmp_path, is_later_used=False) as steps:
        _, (_, files) = steps
    assert files["tide/long.txt"].text == work.tree()["tide/long.txt"]
    assert (files["tide/long.txt"].source, files["tide/long.txt"].is_sure) == ("mixed", False)
    assert (files["tide/low.py"].source, files["tide/low.py"].is_sure) == ("git", True)


def test_work_that_a_command_of_git_throws_away_is_gone(tmp_path):
    work = worked(tmp_path)
    work.read("tide/high.py")
    work.edit("tide/high.py", "return 3", "return 4")
    work.bash("git checkout -- tide/high.py")
    work.read("README.md")
    with walked(work, tmp_path, is_later_used=False) as steps:
        found = [texts(files) for _, files in steps]
    assert found == list(work.before.values())


def test_its_own_answer_is_not_used_for_the_moment_before_it(tmp_path):
    work = worked(tmp_path)
    work.put({"tide/high.py": "def high():\n    return 77\n"})  # never committed
    work.read("tide/high.py")
    with walked(work, tmp_path) as steps:
        (_, files), *_ = steps
    assert "77" not in files["tide/high.py"].text
    with walked(work, tmp_path, is_own_used=True) as steps:
        (_, files), *_ = steps
    assert "77" in files["tide/high.py"].text


_COPY = {"backupFileName": "00ff@v1", "version": 1, "backupTime": "2026-02-03T10:00:00.000Z"}


_KEPT = {"snapshot": {"messageId": "m", "trackedFileBackups": {"tide/high.py": _COPY}}}
_CHANGED = {"snapshotMessageId": "n", "trackingPath": "tide/high.py", "backup": _COPY}


@pytest.mark.parametrize(("kind", "row"), [("snapshot", _KEPT), ("delta", _CHANGED)])
def test_a_copy_that_the_client_kept_tells_what_stood_there(tmp_path, kind, row):
    row = {"type": f"file-history-{kind}", "messageId": "m", **row}
    work = worked(tmp_path)
    work.put({"tide/high.py": "def high():\n    return 77\n"})
    work.read("README.md")
    path = work.session.write(tmp_path / "claude" / "projects")
    path.write_text(path.read_text("utf-8") + json.dumps(row) + "\n", "utf-8")
    copies = tmp_path / "claude" / "file-history" / work.session.session_id
    copies.mkdir(parents=True)
    (copies / "00ff@v1").write_text("def high():\n    return 77\n")
    (state,) = work.before
    shown = Workspaces(Settings(), sources=[path], repositories=[work.root]).show(state)
    (file,) = [file for file in shown["files"] if file["path"].endswith("high.py")]
    assert (file["source"], file["origin"]) == ("log", "00ff@v1")


def test_showing_a_state_reads_nothing_but_the_logs_and_git(tmp_path):
    work = worked(tmp_path)
    work.read("tide/high.py")
    state = work.edit("tide/high.py", "return 3", "return 4")
    path = work.session.write(tmp_path / "projects")
    head = work.git("rev-parse", "HEAD").strip()
    work.put({"tide/high.py": "gone\n"})
    shown = Workspaces(Settings(), sources=[path]).show(state[:12])
    assert shown["state_id"] == state
    assert (shown["root"], shown["commit"], shown["n_files"]) == (str(work.root), head, 4)
    assert shown["calls"] == ["Edit"]
    (file,) = shown["files"]
    assert file["n_chars"] == len(FILES["tide/high.py"])
    assert file["is_sure"] is True


def test_a_session_recorded_on_a_drive_has_the_files_of_its_twin(tmp_path):
    """The same log with the folder as Windows writes it, and with drives in both ways."""
    work = worked(tmp_path)
    work.read("tide/high.py")
    work.edit("tide/high.py", "return 3", "return 4")
    work.write("tide/mean.py", "def mean():\n    return 2\n")
    work.read("tide/low.py")
    twin = work.session.write(tmp_path / "projects")
    lines = twin.read_text("utf-8").replace(
        f"{work.root}/tide/", "c:\\\\Users\\\\ada\\\\tides\\\\tide\\\\"
    )
    drive = tmp_path / "drive" / "projects" / twin.name
    drive.parent.mkdir(parents=True)
    drive.write_text(lines.replace(str(work.root), "C:\\\\Users\\\\ada\\\\tides"), "utf-8")
    found = []
    for log in (twin, drive):
        work_of = Workspaces(Settings(), sources=[log], repositories=[work.root])
        for steps, history in work_of.histories():
            for order, step in enumerate(steps.steps):
                history.enter(order, step)
                root = history.tree_of(step.cwd).root
                paths = history.below(root)
                found.append({path.removeprefix(root): history.file(path).text for path in paths})
                history.take(step)
    assert root == "C:/Users/ada/tides"
    assert found[:4] == found[4:]
    assert len(found) == 8
