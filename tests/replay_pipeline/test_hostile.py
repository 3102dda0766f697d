"""Strangers' text in every place that a person looks at is shown, and does nothing."""

import io
import logging
import os
import pty
import re
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from replay_pipeline.cli import console
from replay_pipeline.cli.console import PrintableFormatter
from replay_pipeline.redaction.printable import printable
from replay_pipeline.stages.chain import by_batch
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.stages.work.markdown import Markdown
from replay_pipeline.storage.processes import child_environment
from tests.hostile import HOSTILE, REMOTE, TERMINAL_CONTROLS
from tests.hostile_data import hostile_root
from tests.support.forked import BIN, forked

OWN_COLORS = re.compile(r"\x1b\[[0-9;]*m")
"""What rich itself writes: colours, and nothing that moves or asks."""


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Pipeline:
    return hostile_root(tmp_path_factory.mktemp("hostile") / "data")


def terminal(command: list[str], folder: Path) -> str:
    """What a command writes to a terminal, stdout and stderr together."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=follower,
        stderr=follower,
        env=child_environment(TERM="xterm-256color", COLUMNS="100"),
    )
    os.close(follower)
    written = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # Linux: the other side is closed
            break
        if not part:
            break
        written += part
    os.close(leader)
    process.wait(60)
    return written.decode("utf-8", "replace").replace("\r\n", "\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["pairs", "show"], ["trace"], ["status"], ["-v", "trace", "\x1b]0;title\x07nothing"]]
)
def test_no_command_sends_a_strangers_escape_to_the_terminal(work, words):
    state = work.root.read("dpo_pairs", work.batches()[0])["state_id"][0].as_py()
    words = [*words, state] if words == ["trace"] else words
    command = forked([BIN / "replay-pipeline", *words, "--data", work.root.path])
    shown = terminal(command, Path.cwd())
    rest = OWN_COLORS.sub("", shown)
    assert not (TERMINAL_CONTROLS - {"\t"}) & set(rest), ascii(rest)[:2000]
    assert "Traceback" not in rest
    if words[0] in ("pairs", "trace"):
        assert "window.hit" in rest


TABLES = [
    lambda text: console.show_pairs({text: {"outcomes": {text: 1}, "n_pairs": 1}}),
    lambda text: console.show_status({
        "batches": {text: {"ingest": 1}}, "played": "sample",
        "ledger": {"ledger": text, "errors": {text: 1}, "scopes": ()},
    }),
    lambda text: console.show_ingest({"skipped": {text: 2}}),
    lambda text: console.show_train({
        "steps": 1, "pairs": 1, "loss_first": 1.0, "loss_last": 1.0, "channels_live": ["replay"],
        "channels_off": {text: text},
    }),
    lambda text: console.show_ranked({"pairs": [{
        "state_id": text, "p_better": None, "doubts": [text],
        "differ": dict.fromkeys(("alike", "rejected", "chosen"), text),
    }]}),
    lambda text: console.show_findings({"findings": [{"ok": False, "what": text, "detail": text}]}),
    lambda text: console.show_teachers({"teachers": [{
        **dict.fromkeys(("teacher", "model", "problem"), text),
        **dict.fromkeys(("is_distillable", "prompt_usd_per_mtok", "completion_usd_per_mtok")),
    }]}),
]  # fmt: skip


@pytest.mark.parametrize("show", TABLES)
def test_tables_show_hostile_names_as_they_are(monkeypatch, show):
    for text in HOSTILE:
        written = io.StringIO()
        monkeypatch.setattr(
            console, "out", Console(file=written, force_terminal=True, width=400, emoji=False)
        )
        show(text)
        rest = OWN_COLORS.sub("", written.getvalue())
        assert not TERMINAL_CONTROLS & set(rest)
        first_line = printable(text).split("\n")[0]
        assert "".join(first_line.split())[:20] in "".join(rest.split())


def test_log_lines_hold_no_escape():
    record = logging.LogRecord("x", logging.INFO, "p", 1, "read %s", ("\x1b[2Jfile",), None)
    assert PrintableFormatter("%(message)s").format(record) == "read �[2Jfile"


def markdown_of(work: Pipeline) -> dict[str, str]:
    """Everything that Dagster would render as Markdown, from the spoiled receipts and tables."""
    return {
        f"{stage.name}/{name}": value
        for stage in by_batch()
        if (receipt := work.receipts.read(stage.name, work.batches()[0]))
        for name, value in stage.facts(work, receipt).items()
        if isinstance(value, Markdown)
    }


@pytest.mark.slow
def test_metadata_of_hostile_data_holds_no_live_markdown(work):
    found = markdown_of(work)
    assert len(found) >= 12
    for name, text in found.items():
        outside = re.sub(r"(?ms)^(`{3,})\w+\n.*?^\1$", "", text)
        outside = re.sub(r"!\[[^\]]*\]\(data:image/svg\+xml;base64,[\w+/=]+\)", "", outside)
        assert not re.search(r"<[a-z/!]|\]\(|\]\[|\]:|://", outside), (name, outside[:300])
        assert REMOTE not in outside
        assert not TERMINAL_CONTROLS & set(text)
