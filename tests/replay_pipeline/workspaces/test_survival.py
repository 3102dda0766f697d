"""What became of edits is held to what git and the disk say afterwards."""

from replay_pipeline.settings import Settings
from replay_pipeline.stages.workspaces import Workspaces, ids_of
from replay_pipeline.workspaces.survival import fates
from tests.support.worked import Worked

FILES = {"tide/high.py": "def high():\n    return 3\n", "tide/low.py": "def low():\n    return 1\n"}


def survival(tmp_path, work):
    path = work.session.write(tmp_path / "projects")
    return {
        ids_of(log)[fate.step.decision]: fate
        for log, history in Workspaces(Settings(), sources=[path]).histories()
        for fate in fates(history, log)
    }


def test_an_edit_that_the_session_took_back_is_undone_and_the_others_are_in_the_commits(tmp_path):
    work = Worked(tmp_path / "tides")
    work.begin(FILES)
    work.read("tide/high.py")
    taken_back = work.edit("tide/high.py", "return 3", "return 30")
    mended = work.edit("tide/high.py", "return 30", "return 4")
    new = work.write("tide/mean.py", "def mean():\n    return 2\n\n\ndef middle():\n    return 2\n")
    lost = work.write("notes.md", "# Not for git\n")
    (work.root / "notes.md").unlink()
    work.session.wait(30)
    work.commit("Raise the tide")
    work.session.wait(30)
    work.put({"tide/mean.py": "def mean():\n    return 2\n"})
    work.commit("Take out the middle")
    edits = survival(tmp_path, work)
    told = {
        name: (each.n_added, each.n_at_end_of_session, each.n_committed, each.n_now)
        for name, each in edits.items()
    }
    assert told == {
        taken_back: (1, 0, None, None),
        mended: (1, 1, 1, 1),
        new: (4, 4, 4, 2),
        lost: (1, 1, None, None),
    }
    assert edits[taken_back].is_undone


def test_a_line_is_followed_by_its_place_and_not_by_its_text_alone(tmp_path):
    """The same words elsewhere in the file are another line."""
    functions = [f"def tide{n}():\n    wait()\n    return {n}\n" for n in range(4)]
    work = Worked(tmp_path / "tides")
    work.begin({"tide.py": "\n".join(functions)})
    work.read("tide.py")
    added = work.edit(
        "tide.py", "    wait()\n    return 2\n", "    wait()\n    wait()\n    return 2\n"
    )
    back = work.edit("tide.py", "    wait()\n    wait()\n    return 2\n", "    return 2\n")
    edits = survival(tmp_path, work)
    assert back not in edits
    assert (edits[added].n_added, edits[added].n_at_end_of_session) == (1, 0)
    assert edits[added].is_undone


def test_an_edit_that_only_takes_out_or_moves_blanks_has_no_lines_to_follow(tmp_path):
    work = Worked(tmp_path / "tides")
    work.begin(FILES)
    work.read("tide/low.py")
    work.edit("tide/low.py", "    return 1\n", "")
    work.edit("tide/low.py", "def low():", "  def low():")
    edits = survival(tmp_path, work)
    assert edits == {}
