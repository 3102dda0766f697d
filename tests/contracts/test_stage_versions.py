"""A stage that writes other rows has another version, so that a run finds what older code wrote.

After a change of rows that is meant, raise `version` of the stage, and record again:

    python -m tests.contracts.test_stage_versions
"""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow.parquet as pq
import pytest

import replay_pipeline
from replay_pipeline.settings import Settings
from replay_pipeline.stages import chain
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.testing.sample import SESSIONS_DIR

GOLDEN = Path(__file__).parent / "stage_versions.json"
SESSIONS = ("6cfe9440", "a9359e44", "e281782e")
"""Short ones, with pairs and agreements."""
ACCIDENTS = {"latency_s", "generation_id", "project", "source_path_sha"}
"""Columns that say when and where, and not what."""
RULES = Path(replay_pipeline.__file__).parent / "redaction"
"""Its tables decide what ingestion takes out, though the sample holds a few secrets only."""


def digests(folder: Path) -> dict[str, dict[str, object]]:
    """Take a few sessions through the chain, and return the version and a digest of the rows of each stage."""
    logs = folder / "logs" / "-home-mira-code"
    logs.mkdir(parents=True)
    for name in SESSIONS:
        shutil.copy(next(SESSIONS_DIR.rglob(f"{name}*.jsonl")), logs)
    changes = {
        "ingest": {"sources": [logs], "settle_s": 0},
        "replay": {"sample_teachers": True, "ask_at": "steps"},
        "pairs": {"min_p_better": 0},
    }
    work = Pipeline(Settings.load(data_dir=folder / "data", changes=changes, env={}))
    [batch] = work.ingest_new()
    for stage in (work.replay, work.pairs, work.normalize):
        stage(batch)
    work.publish()
    found: dict[str, dict[str, object]] = {}
    for stage in chain.STAGES:
        if stage.name == "train":  # a model is no table
            continue
        folders = [f"{table}" for table in stage.writes] or ["dataset/data"]
        digest = hashlib.sha256()
        for name in folders:
            for path in sorted((folder / "data" / name).rglob("*.parquet")):
                table = pq.ParquetFile(path).read()
                for column in table.column_names:
                    if column not in ACCIDENTS:
                        rows = json.dumps(table[column].to_pylist(), default=str)
                        digest.update(f"{name} {column} {rows}\n".encode())
        if stage.name == "ingest":
            for path in sorted(RULES.rglob("*.toml")):
                digest.update(path.read_bytes())
        found[stage.name] = {"version": stage.version, "rows": digest.hexdigest()[:16]}
    return found


@pytest.mark.slow
def test_a_stage_that_writes_other_rows_has_another_version(tmp_path):
    golden = json.loads(GOLDEN.read_text())
    for name, found in digests(tmp_path).items():
        assert found == golden[name], (
            f"`{name}` writes other rows than were recorded: raise `version` of its Stage if they are "
            f"meant, and record again by: python -m tests.contracts.test_stage_versions"
        )


def record() -> None:
    """Record the digests of today. Rows that changed need another version."""
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    os.environ["REPLAY_SALT"] = ""
    with TemporaryDirectory() as name:
        found = digests(Path(name))
    for stage, row in found.items():
        before = golden.get(stage, row)
        if before["version"] == row["version"] and before["rows"] != row["rows"]:
            sys.exit(f"`{stage}` writes other rows: raise `version` of its Stage, and record again")
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    record()
