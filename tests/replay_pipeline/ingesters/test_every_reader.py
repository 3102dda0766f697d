"""What holds for every reader of ours, each on a session in the form of its agent."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from replay_pipeline.errors import IngestError
from replay_pipeline.ingesters.corpus import readers
from tests.replay_pipeline.ingesters import (
    test_agent_lightning,
    test_atif,
    test_cline,
    test_copilot,
    test_cursor,
    test_other_agents,
    test_pi,
    test_qwen_code,
    test_trajectories,
)
from tests.replay_pipeline.ingesters.logs import Log
from tests.replay_pipeline.ingesters.test_other_agents import read
from tests.replay_pipeline.ingesters.test_properties import mutated


def rows(*found: Any) -> list[bytes]:
    return [json.dumps(row).encode() + b"\n" for row in found]


def claude_code() -> list[bytes]:
    log = Log()
    log.user("go")
    log.says("m1", "done")
    return log.lines


def codex() -> list[bytes]:
    meta = {"id": "s", "cwd": "/w", "cli_version": "1", "base_instructions": {"text": "Be brief."}}
    items = [{"type": "response_item", "payload": i} for i in test_other_agents.codex_items()]
    return rows({"type": "session_meta", "payload": meta}, *items)


SAMPLES: dict[str, tuple[Callable[[], list[bytes]], str | None]] = {
    "agent_data_protocol": (lambda: rows(test_trajectories.adp()), None),
    "mini_swe_agent": (
        lambda: rows(test_trajectories.mini_swe_agent()),
        test_trajectories.SYSTEM,
    ),
    "openhands": (lambda: rows(*test_trajectories.openhands()), test_trajectories.SYSTEM),
    "openhands_history": (
        lambda: rows(test_trajectories.openhands_history()),
        test_trajectories.SYSTEM,
    ),
    "session_traces": (
        lambda: rows(*test_trajectories.session_trace()),
        test_trajectories.SYSTEM,
    ),
    "swe_agent": (lambda: rows(test_trajectories.swe_agent()), test_trajectories.SYSTEM),
    "agent_lightning": (
        lambda: rows(*test_agent_lightning.events()),
        "You are a scheduling assistant.",
    ),
    "agent_traces": (lambda: rows(*[test_other_agents.agent_trace()] * 2), "You are pi."),
    "atif": (lambda: rows(test_atif.trajectory()), "Be brief."),
    "claude_code": (claude_code, None),
    "cline": (lambda: rows(test_cline.session()), "You are Cline."),
    "codex": (codex, "Be brief."),
    "copilot": (lambda: rows(*test_copilot.session().rows), "You are Copilot."),
    "cursor": (lambda: rows(*test_cursor.run()), None),
    "gemini_cli": (lambda: rows(test_other_agents.gemini()), None),
    "opencode": (lambda: rows(test_other_agents.opencode()), None),
    "pi": (lambda: rows(*test_pi.session(test_pi.Entries()).rows), None),
    "qwen_code": (
        lambda: [
            f"{row}\n".encode()
            for row in json.loads(gzip.decompress(test_qwen_code.RECORDING.read_bytes()))["rows"]
        ],
        None,
    ),
    "verifiers": (lambda: rows(test_other_agents.episode()), "You fix."),
}
"""By reader: a session, and the system text that it records."""


def test_every_reader_has_a_session_here_and_alone_takes_it():
    for name, (sample, _) in SAMPLES.items():
        taken = [reader.name for reader in readers() if reader.sniff(b"".join(sample()))]
        assert taken[0] == name.removesuffix("_history")
    assert {reader.name for reader in readers()} == set(SAMPLES) - {"openhands_history"}


@pytest.mark.parametrize("name", [name for name, (_, text) in SAMPLES.items() if text])
def test_a_recorded_system_text_stays_the_systems(name: str, tmp_path: Path):
    sample, text = SAMPLES[name]
    (tmp_path / "log.json").write_bytes(b"".join(sample()))
    _, (state, *_) = read(tmp_path / "log.json")
    assert state["system"] == [text]
    assert [m["role"] for m in state["messages"] if text in str(m["content"])] == ["system"]


@pytest.mark.parametrize("name", SAMPLES)
def test_damage_is_no_exception_and_every_row_is_accounted_for(name: str, tmp_path: Path):
    source, path, n_read = SAMPLES[name][0](), tmp_path / "x.jsonl", 0
    for seed in range(40):
        random = Random(seed)
        path.write_bytes(
            b"".join(mutated(r, random) if random.random() < 0.5 else r for r in source)
        )
        try:
            read(path)
            n_read += 1
        except IngestError:
            continue
    assert n_read > 6


def test_what_is_no_session_is_left_out(tmp_path: Path):
    (tmp_path / "package.json").write_text('{"name": "shop", "messages": 3}')
    (tmp_path / "log.jsonl").write_bytes(b"".join(codex()))
    assert read(tmp_path)[0].report.skipped_files == {"foreign": 1}
