"""Figures that appear in several places are the same, and cost what an independent count says.

The logs are those of real clients (`tests/data/clients`). Since 2.1.280 a client logs its own count of
dollars and tokens, `cost-state`: an oracle that nothing of this package has made.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from replay_pipeline.cli import app
from replay_pipeline.ingesters import ingest
from replay_pipeline.stages.budget.spending import estimate_replay
from replay_pipeline.stages.pages.look import look
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.stages.views.page import write_page_of
from replay_pipeline.testing.sample import SESSIONS_DIR
from tests.roots import sample_root

CLIENTS = sorted((Path(__file__).parents[1] / "data" / "clients").glob("*.json.gz"))
DOLLARS_PER_MTOK = {"claude-opus-5-5": (4.0, 20.0, 0.2)}
"""Fresh input, output and reading the cache, as the vendor's page had it; a write for an hour is twice
the input, one for five minutes 1.25 of it."""
KINDS = ("input", "cache_write", "cache_write_1h", "cache_read", "output")


def logs_of(archive: Path, folder: Path) -> list[Path]:
    logs = json.loads(gzip.decompress(archive.read_bytes()))["logs"]
    paths = []
    for name, rows in logs.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths.append(path)
    return paths


def counted(paths: list[Path]) -> tuple[dict[str, int], float]:
    """Tokens by kind and dollars from the raw rows: each API message once, its last usage."""
    usages: dict[str, tuple[str, dict[str, Any]]] = {}
    for path in paths:
        for row in map(json.loads, path.read_text().splitlines()):
            message = row.get("message")
            if row.get("type") == "assistant" and message["model"] != "<synthetic>":
                usages[message["id"]] = (message["model"], message["usage"])
    tokens, usd = dict.fromkeys(KINDS, 0), 0.0
    for model, usage in usages.values():
        lifetimes = usage["cache_creation"]
        of_one = dict(zip(KINDS, (
            usage["input_tokens"], lifetimes["ephemeral_5m_input_tokens"],
            lifetimes["ephemeral_1h_input_tokens"], usage["cache_read_input_tokens"],
            usage["output_tokens"],
        ), strict=True))  # fmt: skip
        fresh, output, read = DOLLARS_PER_MTOK[model]
        rates = dict(zip(KINDS, (fresh, 1.25 * fresh, 2 * fresh, read, output), strict=True))
        for kind, n in of_one.items():
            tokens[kind] += n
            usd += n * rates[kind] / 1e6
    return tokens, usd


@pytest.mark.parametrize("archive", CLIENTS, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_real_sessions_cost_what_an_independent_count_of_the_raw_log_says(archive, tmp_path):
    paths = logs_of(archive, tmp_path / "logs")
    tokens, usd = counted(paths)
    figures = look(paths, to=tmp_path / "look")
    assert figures["tokens"] == tokens
    rows = [json.loads(row) for path in paths[:1] for row in path.read_text().splitlines()]
    by_client = [row["totalCostUSD"] for row in rows if row["type"] == "cost-state"]
    # What the client paid for without a row (a compaction) is in its own count alone.
    assert figures["cost_usd"] == pytest.approx(max(usd, by_client[-1]), rel=0.01)
    assert usd > 0


def test_a_session_costs_what_its_own_client_counted(tmp_path):
    n_held = 0
    for archive in CLIENTS:
        paths = logs_of(archive, tmp_path / archive.name)
        if len(paths) > 1:
            continue  # the count of a fork begins with that of its parent
        states = [
            row for row in map(json.loads, paths[0].read_text().splitlines())
            if row.get("type") == "cost-state"
        ]  # fmt: skip
        figures = look(paths, to=tmp_path / f"{archive.name}-look")
        last = states[-1]
        uses = last["modelUsage"].values()
        assert figures["cost_usd"] == pytest.approx(last["totalCostUSD"], rel=0.01)
        if figures["tokens"]["output"] != sum(use["outputTokens"] for use in uses):
            continue  # the client pays for small calls of its own too, which have no row
        n_held += 1
        assert figures["tokens"]["cache_read"] == sum(u["cacheReadInputTokens"] for u in uses)
        told = [use.get("cacheCreationEphemeral1hInputTokens") for use in uses]
        assert None in told or figures["tokens"]["cache_write_1h"] == sum(told)
    assert n_held >= 2


USAGE = {
    "input": "input_tokens", "cache_read": "cache_read_input_tokens", "output": "output_tokens",
    "cache_write_1h": "cache_creation_1h_input_tokens",
}  # fmt: skip


@pytest.mark.parametrize("source", ["sample", *CLIENTS], ids=lambda s: getattr(s, "name", s))
def test_look_and_ingest_count_the_same(source, tmp_path):
    paths = [SESSIONS_DIR] if source == "sample" else logs_of(source, tmp_path / "logs")
    figures, report = look(paths, to=tmp_path / "look"), ingest(paths).report
    total = figures["total"]
    assert (total["sessions"], total["states"]) == (report.n_sessions, report.n_states)
    assert figures["outcomes"] == dict(report.outcomes)
    if not report.answers["without_prompt"]:
        assert {kind: figures["tokens"][kind] for kind in USAGE} == {
            kind: report.usage[name] for kind, name in USAGE.items()
        }


def rounded(value: Any) -> Any:
    """The same with fewer digits: sums of dollars depend on their order in the last one."""
    return json.loads(json.dumps(value), parse_float=lambda text: round(float(text), 9))


@pytest.mark.slow
def test_a_page_of_logs_one_of_the_data_root_estimate_and_status_say_the_same(tmp_path):
    work = sample_root(tmp_path / "data")
    work.ingest_new()
    of_logs = look([SESSIONS_DIR], to=tmp_path / "of-logs")
    of_root = write_page_of(Pipeline(work.settings), tmp_path / "of-root")
    same = ("total", "tokens", "cost_usd", "outcomes", "tools", "days", "models", "projects")
    for name in same:
        assert rounded(of_root[name]) == rounded(of_logs[name])
    # A state whose prompt lacks something is not asked.
    assert estimate_replay(work).n_states == len(work.asked_states(work.batches())) > 400
    assert len(work.states(work.batches())) == of_root["total"]["states"]
    told = CliRunner().invoke(app, ["status", "--data", str(tmp_path / "data"), "--json"])
    batches = json.loads(told.stdout)["batches"].values()
    assert sum(row["ingest"] for row in batches) == of_root["total"]["states"]
