"""A look is answered where every way in which the files may have been shows the same."""

from contextlib import closing, contextmanager

from replay_pipeline.settings import Settings
from replay_pipeline.stages.work.workspaces import Workspaces
from replay_pipeline.workspaces.looks import LookPlace, look_at
from tests.support.worked import Worked

FILES = {
    "tide/high.py": "def high():\n    return 3\n",
    "tide/low.py": "def low():\n    return 1\n",
    "tide/mean.py": "def mean():\n    return 2\n",
}


@contextmanager
def looking(work, tmp_path, repository, n_steps=None):
    """Answers looks after the last call of a session, or after so many, from a repository without a log of its own."""
    path = work.session.write(tmp_path / "projects")
    work = Workspaces(Settings(), sources=[path], repositories=[repository])
    with closing(work.histories()) as histories:
        log, history = next(histories)
        steps = log.steps[:n_steps]
        for order, step in enumerate(steps):
            history.enter(order, step)
            history.take(step)
        history.enter(len(steps), steps[-1], is_own_used=True)
        at = LookPlace(history, len(steps), steps[-1], log.steps)

        def seen(name, **arguments):
            found = look_at(at, name, arguments, None)
            return found.text if found is not None else None

        yield seen


def test_what_differs_between_commits_that_may_be_or_may_have_been_changed_is_not_told(tmp_path):
    work = Worked(tmp_path / "tides")
    work.begin(FILES)
    work.put({"tide/low.py": "def low():\n    return 10\n"})
    work.commit("Lower")  # nothing in the log tells whether it was there already
    work.read("tide/mean.py")
    work.bash("sed -i s/2/20/ tide/mean.py")
    work.read("tide/high.py")
    clone, root = bare(work, tmp_path), work.root
    with looking(work, tmp_path, clone) as seen:
        assert seen("Read", file_path=f"{root}/tide/high.py").startswith("     1→def high")
        assert seen("Read", file_path=f"{root}/tide/low.py") is None
        assert seen("Read", file_path=f"{root}/tide/mean.py") is None
        assert seen("Grep", pattern="return 3") == "Found 1 file\ntide/high.py"
        assert seen("Grep", pattern="return") is None
        assert seen("Grep", pattern="def low", output_mode="content") == "tide/low.py:1:def low():"
        assert seen("Glob", pattern="**/low*") == f"{root}/tide/low.py"


def test_during_a_merge_nobody_knows_where_git_has_set_its_marks(tmp_path):
    work = Worked(tmp_path / "tides")
    work.begin(FILES)
    work.git("checkout", "-q", "-b", "other")
    work.put({"tide/low.py": "def low():\n    return 10\n"})
    work.commit("Lower")
    work.git("checkout", "-q", "main")
    work.put({"tide/low.py": "def low():\n    return 0\n"})
    work.commit("Lowest")
    work.read("tide/high.py")
    work.bash("git -c user.name=M -c user.email=m@example.org merge other")
    with looking(work, tmp_path, work.root) as seen:
        assert seen("Grep", pattern="<<<<", path=f"{work.root}/tide/low.py") is None
        assert seen("Read", file_path=f"{work.root}/tide/mean.py") is None


def bare(work, tmp_path):
    """The history of a project in a clone; its folder is gone."""
    clone = tmp_path / "clone"
    work.git("clone", "-q", "--bare", str(work.root), str(clone), cwd=tmp_path)
    work.root.rename(tmp_path / "moved")
    return clone


def test_nothing_is_told_of_files_at_a_commit_that_the_repository_has_not(tmp_path):
    work = Worked(tmp_path / "tides")
    work.begin(FILES)
    clone = tmp_path / "clone"
    work.git("clone", "-q", "--bare", str(work.root), str(clone), cwd=tmp_path)
    work.read("tide/high.py")
    work.put({"tide/low.py": "def low():\n    return 10\n"})
    work.commit("Lower")
    work.bash("git log --oneline -2")
    work.root.rename(tmp_path / "moved")
    with looking(work, tmp_path, clone) as seen:
        assert seen("Read", file_path=f"{work.root}/tide/low.py") is None
        assert seen("Grep", pattern="return 1") is None


def test_files_that_commands_removed_or_git_never_had_may_be_listed_or_not(tmp_path):
    work = Worked(tmp_path / "tides")
    work.begin({**FILES, ".gitignore": "drafts/\n"})
    work.read("tide/high.py")
    work.bash("rm -f tide/mean.py")
    work.put({"drafts/plan.md": "Plan\n"})
    work.read("drafts/plan.md")
    clone, root = bare(work, tmp_path), work.root
    with looking(work, tmp_path, clone) as seen:
        assert seen("Glob", pattern="**/low*") == f"{root}/tide/low.py"
        assert seen("Glob", pattern="tide/*.py") is None
        assert seen("Glob", pattern="**/*.md") is None
        assert seen("Glob", pattern="*.md", path=f"{root}/drafts") is None
        assert seen("Glob", pattern="*.md", path=f"{root}/papers") is None
        assert seen("Read", file_path=f"{root}/REDACTED.py") is None


def test_a_linter_may_mend_what_was_written_since(tmp_path):
    work = Worked(tmp_path / "tides")
    work.begin(FILES)
    work.read("tide/high.py")
    work.edit("tide/high.py", "return 3", "return 4")
    work.read("tide/low.py")
    work.bash("make lint || true")
    clone = bare(work, tmp_path)
    with looking(work, tmp_path, clone) as seen:
        assert seen("Read", file_path=f"{work.root}/tide/high.py") is None
        assert seen("Read", file_path=f"{work.root}/tide/low.py").startswith("     1→def low")


def test_what_a_search_found_tells_which_commit_is_checked_out(tmp_path):
    work = Worked(tmp_path / "tides")
    work.begin(FILES)
    work.put(
        {
            "tide/low.py": "\ndef low():\n    return 10\n",
            "tide/mean.py": "def mean():\n    return 20\n",
        }
    )
    work.commit("Lower")
    work.read("tide/high.py")
    work.session.result(
        work.call("Grep", pattern="def low", output_mode="content")[1], "tide/low.py:2:def low():"
    )
    clone = bare(work, tmp_path)
    with looking(work, tmp_path, clone) as seen:
        assert "return 20" in seen("Read", file_path=f"{work.root}/tide/mean.py")


def test_a_file_is_told_as_it_was_found_right_behind_a_command_that_may_have_changed_it(tmp_path):
    work = Worked(tmp_path / "tides")
    work.begin(FILES)
    work.edit("tide/low.py", "return 1", "return  2")
    work.bash("sed -i 's/  2/ 2/' tide/low.py")
    work.read("tide/high.py")
    clone, path = bare(work, tmp_path), f"{work.root}/tide/low.py"
    with looking(work, tmp_path, clone) as seen:
        assert seen("Read", file_path=path) is None
    (tmp_path / "moved").rename(work.root)
    work.read("tide/low.py")
    with looking(work, tmp_path, clone, n_steps=3) as seen:
        assert "return 2\n" in seen("Read", file_path=path)


def test_before_its_first_commit_a_branch_is_where_it_began(tmp_path):
    work = Worked(tmp_path / "tides")
    work.begin(FILES)
    work.put({"tide/low.py": "def low():\n    return 10\n"})
    work.commit("Lower")
    work.git("checkout", "-q", "-b", "mend")
    work.session.git_branch = "mend"
    work.read("tide/high.py")
    work.edit("tide/high.py", "return 3", "return 4")
    work.commit("Mend")
    work.git("checkout", "-q", "main")
    clone = bare(work, tmp_path)
    with looking(work, tmp_path, clone, n_steps=1) as seen:
        assert "return 10" in seen("Read", file_path=f"{work.root}/tide/low.py")
