"""What became of edits by the end of their session."""

from replay_pipeline.settings import Settings
from replay_pipeline.stages.work.workspaces import Workspaces, ids_of
from replay_pipeline.workspaces.survival import FateBook
from tests.support.worked import Worked

FILES = {"tide/high.py": "def high():\n    return 3\n", "tide/low.py": "def low():\n    return 1\n"}


def fates(tmp_path, work):
    path = work.session.write(tmp_path / "projects")
    found = {}
    for log, history in Workspaces(Settings(), sources=[path]).histories():
        book = FateBook(history)
        for order, step in enumerate(log.steps):
            history.enter(order, step)
            book.take(step)
        found |= {ids_of(log)[step.decision]: became for step, became in book.settled()}
    return found


def test_an_edit_that_the_session_took_back_is_undone_and_the_others_are_kept(tmp_path):
    work = Worked(tmp_path / "tides")
    work.begin(FILES)
    work.read("tide/high.py")
    taken_back = work.edit("tide/high.py", "return 3", "return 30")
    mended = work.edit("tide/high.py", "return 30", "return 4")
    new = work.write("tide/mean.py", "def mean():\n    return 2\n\n\ndef middle():\n    return 2\n")
    work.read("tide/low.py")
    work.edit("tide/low.py", "    return 1\n", "")  # neither has lines to follow
    work.edit("tide/low.py", "def low():", "  def low():")
    assert fates(tmp_path, work) == {taken_back: "undone", mended: "kept", new: "kept"}


def test_a_line_is_followed_by_its_place_and_not_by_its_text_alone(tmp_path):
    """The same words elsewhere in the file are another line."""
    functions = [f"def tide{n}():\n    wait()\n    return {n}\n" for n in range(4)]
    work = Worked(tmp_path / "tides")
    work.begin({"tide.py": "\n".join(functions)})
    work.read("tide.py")
    added = work.edit(
        "tide.py", "    wait()\n    return 2\n", "    wait()\n    wait()\n    return 2\n"
    )
    work.edit("tide.py", "    wait()\n    wait()\n    return 2\n", "    return 2\n")
    assert fates(tmp_path, work) == {added: "undone"}
