"""Record a data root as an older version of this program leaves it.

    git archive 4d2e289 | tar x -C OLD && cd OLD && PYTHONPATH=. python RECORD.py 0.1.0.tar.xz

takes one project of that version's sample through every stage but the training. The sessions lie at
a place that is gone afterwards, as logs are after some weeks.
"""

import importlib
import shutil
import sys
import tarfile
from pathlib import Path

from replay_pipeline.settings import Settings

PLACE = Path("/tmp/recorded")
PROJECT = "-home-mira-code-tideline"


def module(*names: str):
    for name in names:
        try:
            return importlib.import_module(f"replay_pipeline.{name}")
        except ModuleNotFoundError:
            continue
    raise SystemExit(f"none of {names}")


def main(target: str) -> None:
    sample = module("testing.sample", "sample")
    shutil.rmtree(PLACE, ignore_errors=True)
    shutil.copytree(sample.SESSIONS_DIR / PROJECT, PLACE / "sessions")
    changes = {
        "ingest": {"sources": [PLACE / "sessions"], "max_batch_sessions": 4},
        "replay": {"sample_teachers": True},
    }
    settings = Settings.load(data_dir=PLACE / "data", changes=changes, env={})
    module("stages.pipeline", "pipeline").run(settings, with_training=False)
    with tarfile.open(target, "w:xz") as archive:
        for path in sorted((PLACE / "data").rglob("*")):
            if path.is_file() and path.suffix not in (".lock", "-wal", "-shm"):
                archive.add(path, path.relative_to(PLACE / "data"))
    shutil.rmtree(PLACE)


if __name__ == "__main__":
    main(sys.argv[1])
