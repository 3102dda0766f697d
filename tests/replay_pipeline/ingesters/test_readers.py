"""Readers are found by entry point: ours, and those of packages that a user installs."""

import json
import subprocess
import sys
from pathlib import Path

from replay_pipeline.ingesters.corpus import readers

READER = """
from replay_pipeline.ingesters.base import SessionLog, Turn


class Diary:
    name = "diary"

    def sniff(self, head):
        return head.startswith(b'{"diary"')

    def read(self, path, counts, end=None):
        counts.rows += 1
        counts.count(None)
        asked = Turn(None, "user", 0, "u1", texts=["Mend it."], index=0)
        did = Turn(asked, "assistant", 0, "a1", message_id="m1", texts=["Done."], index=1)
        yield SessionLog("monday", self.name, [asked, did])
"""


def test_ours_are_tried_from_the_narrowest_to_the_widest():
    names = [reader.name for reader in readers()]
    assert names[:3] == ["claude_code", "opencode", "qwen_code"]
    assert names[-1] == "agent_traces"
    assert len(names) == 20


def test_a_reader_of_another_package_works_from_the_command_line(tmp_path: Path):
    site = tmp_path / "site"
    told = site / "diary-1.0.dist-info"
    told.mkdir(parents=True)
    (site / "diary.py").write_text(READER)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: diary\nVersion: 1.0\n")
    (told / "entry_points.txt").write_text("[replay_pipeline.ingesters]\ndiary = diary:Diary\n")
    (tmp_path / "log.jsonl").write_text('{"diary": 1}\n')
    command = [sys.executable, "-m", "replay_pipeline.cli", "ingest", tmp_path / "log.jsonl"]
    done = subprocess.run(
        [*command, "--out", tmp_path / "out", "--json"],
        env={"PYTHONPATH": str(site), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["n_states"], report["rows"], report["rows_used"]) == (1, 1, 1)


def test_a_reader_that_cannot_be_loaded_is_named(tmp_path: Path):
    told = tmp_path / "diary-1.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: diary\nVersion: 1.0\n")
    (told / "entry_points.txt").write_text("[replay_pipeline.ingesters]\ndiary = gone:Diary\n")
    (tmp_path / "log.jsonl").write_text('{"type": "user"}\n')
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "replay_pipeline.cli",
            "ingest",
            tmp_path,
            "--out",
            tmp_path / "out",
        ],
        env={"PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "gone:Diary: this reader cannot be loaded" in " ".join(done.stderr.split())
