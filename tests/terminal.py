"""What commands print about the sample in terminals of 80 and 120 columns, with its accidents taken out.

`python -m tests.terminal` writes it to `tests/data/terminal`, to be read before it is committed.
"""

import json
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from io import StringIO
from pathlib import Path
from unittest import mock

import pytest
from rich.console import Console

from replay_pipeline.cli import console
from replay_pipeline.cli.shared import estimate_of, ranked_row
from replay_pipeline.stages import pipeline
from replay_pipeline.stages.receipts import Overview, now
from replay_pipeline.stages.views.status import status_of
from replay_pipeline.stages.views.summary import ranked_pairs
from tests.roots import project_root

FOLDER = Path(__file__).parent / "data" / "terminal"
WIDTHS = (80, 120)
TRAINED = FOLDER / "train.json"
"""The report of a training on the sample, as `replay-pipeline train --json` gave it."""


@contextmanager
def of_width(width: int) -> Iterator[StringIO]:
    """A terminal without colors; gives what is printed to it."""
    written = StringIO()
    screen = Console(file=written, width=width, force_terminal=True, color_system=None, emoji=False)
    with mock.patch.object(console, "out", screen):
        yield written


def printed(folder: Path) -> dict[str, str]:
    """Run the sample in an empty folder, and return what commands print of it, by `NAME-WIDTH`."""
    work = project_root(folder / "data")
    began = now()
    batches = work.ingest_new()
    reports = {"estimate": estimate_of(work, batches)}
    summary = pipeline.run(work.settings, with_training=False, since=began)
    # How long it took is an accident, and so is where it lies.
    summary["seconds"] = dict.fromkeys(summary["seconds"], 1.5)
    trained = json.loads(TRAINED.read_text())
    summary |= {"train": trained, "curves": trained["curves"], "dataset": "data/dataset"}
    reports["pairs"] = {batch: work.pairs(batch).report for batch in batches}
    ranked = [ranked_row(pair) for pair in ranked_pairs(work)[:5]]
    reports["status"] = status_of(Overview(work.settings))
    shown: dict[str, Callable[[], None]] = {
        "estimate": lambda: console.show_estimate(reports["estimate"]),
        "run": lambda: console.show_run(summary),
        "pairs": lambda: console.show_pairs(reports["pairs"]),
        "rank": lambda: console.show_ranked({"pairs": ranked}),
        "status": lambda: console.show_status(reports["status"]),
        "train": lambda: console.show_train(trained),
    }
    found = {}
    with chdir(folder):
        for name, show in shown.items():
            for width in WIDTHS:
                with of_width(width) as written:
                    show()
                found[f"{name}-{width}"] = plain(written.getvalue())
    return found


def plain(text: str) -> str:
    """Take out what is another each time: dates, hashes of batches and ids of runs."""
    text = re.sub(r"\d{4}-\d\d-\d\d-(\d{4})-[0-9a-f]{6}", r"2026-01-02-\1-0a1b2c", text)
    text = re.sub(r"\b\d{4}-\d\d-\d\d (?=\$)", "2026-01-02 ", text)
    runs = sorted(line for line in text.split("\n") if _RUN.search(line))
    in_order = iter(sorted(_RUN.sub("run 00000000", line) for line in runs))
    lines = [next(in_order) if _RUN.search(line) else line for line in text.split("\n")]
    return "\n".join(line.rstrip() for line in lines)


_RUN = re.compile(r"\brun [0-9a-f]{8}\b")


def main() -> None:
    """Write what is printed."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPLAY_CONFIG_DIR", f"{folder}/config")
        for name, text in printed(Path(folder)).items():
            (FOLDER / f"{name}.txt").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
