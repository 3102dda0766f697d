"""Recorded calls on rebuilt trees: what is reproduced is what the record says, and the rest is told."""

from benchmarks.commands import checks_of, shares
from replay_pipeline.settings import Settings
from replay_pipeline.stages.work.workspaces import Workspaces
from tests.support.worked import Worked

FILES = {
    "README.md": "# Tides\n",
    "tide/high.py": "def high():\n    return 3\n",
    "tide/low.py": "def low():\n    return 1\n",
}


def reproduced(path, *, repositories=(), **options):
    work = Workspaces(Settings(), sources=[path], repositories=repositories)
    return shares(checks_of(work, **options))


def recorded(tmp_path):
    work = Worked(tmp_path / "tides")
    work.begin(FILES)
    high = str(work.root / "tide" / "high.py")
    work.read("tide/high.py")
    work.edit("tide/high.py", "return 3", "return 4")
    work.failed(
        "Edit", "String to replace not found in file.\nString: return 3",
        file_path=high, old_string="return 3", new_string="return 5",
    )  # fmt: skip
    work.failed("Read", "File does not exist.", file_path=str(work.root / "tide" / "mid.py"))
    work.grep("return [0-9]")
    work.put({"tide/low.py": "def low():\n    return 10\n"})
    work.read("tide/low.py")  # nobody committed it: it cannot be known
    return work


def test_every_recorded_call_is_counted_and_what_is_not_reproduced_has_a_reason(tmp_path):
    work = recorded(tmp_path)
    path = work.session.write(tmp_path / "projects")
    tools = reproduced(path)[str(work.root)]
    assert {name: (row["n_same"], row["n"]) for name, row in tools.items()} == {
        "Read": (1, 2),
        "Edit": (1, 1),
        "Grep": (1, 1),
        "failed Edit": (1, 1),
        "failed Read": (1, 1),
    }
    assert tools["Read"]["reasons"] == {"changed_elsewhere": 1}
    assert tools["Edit"]["n_exact"] == 1


def test_a_wrong_record_is_not_reproduced(tmp_path):
    """An edit of another file than there was, lines that were not there, another search."""
    work = recorded(tmp_path)
    wrong = [
        line.replace('"originalFile":"', '"originalFile":"# Other\\n')
        .replace('"content":"def high', '"content":"def low')
        .replace("\\ntide/low.py", "\\ntide/no.py")
        for line in work.session.lines()
    ]
    assert sum(a != b for a, b in zip(wrong, work.session.lines(), strict=True)) == 3
    path = tmp_path / "projects" / "wrong.jsonl"
    path.parent.mkdir()
    path.write_text("\n".join(wrong) + "\n")
    tools = reproduced(path, is_later_used=False)[str(work.root)]
    assert tools["Read"]["n_same"] == 0
    assert tools["Edit"]["n_exact"] == 0
    assert tools["Grep"]["n_same"] == 0


def test_a_repository_that_lies_elsewhere_tells_the_same(tmp_path):
    work = recorded(tmp_path)
    path = work.session.write(tmp_path / "projects")
    clone = tmp_path / "clone"
    work.git("clone", "-q", "--bare", str(work.root), str(clone), cwd=tmp_path)
    work.root.rename(tmp_path / "moved")
    tools = reproduced(path, repositories=[clone])["all"]
    assert (tools["Read"]["n_same"], tools["Edit"]["n_same"]) == (1, 1)
