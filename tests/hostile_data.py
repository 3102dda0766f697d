"""A data root in which strangers' text is everywhere that a stranger can put it."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from replay_pipeline.stages.chain import stage_named
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.stages.views.page import write_page_of
from replay_pipeline.storage.tables import DataRoot
from tests.hostile import HOSTILE
from tests.roots import PROJECT, run_batches, sample_root

_COUNTED = ("outcomes", "errors", "skipped", "redactions", "dropped", "pairs_by_source")


def hostile_root(root: Path) -> Pipeline:
    """A project of the sample with hostile text in messages, actions, hints, names, errors and receipts."""
    work = sample_root(root, n_batch_sessions=64, sessions=PROJECT)
    run_batches(work)
    (batch,) = work.batches()
    texts = itertools.cycle(HOSTILE)
    for table in ("turns", "states", "teacher_actions", "dpo_pairs", "outcomes"):
        _spoil(work.root, table, batch, texts)
    for receipt in list(work.receipts.all()):
        report = _spoiled_report(receipt.report, texts)
        stage = stage_named(receipt.stage)
        work.receipts.write(
            replace(
                receipt,
                report=report,
                seconds=1.0,
                inputs={**work.digests(batch, stage.reads), **stage.inputs(work, batch)},
                outputs=work.digests(batch, stage.writes) if receipt.batch == batch else {},
            )
        )
    work.normalize(batch)
    work.publish()
    write_page_of(work)
    return work


def _spoil(root: DataRoot, table: str, batch: str, texts) -> None:
    rows = root.read(table, batch).to_pylist()
    for row in rows:
        for name, value in row.items():
            if isinstance(value, str):
                row[name] = _spoiled(name, value, texts)
            elif isinstance(value, list) and table != "states":
                row[name] = [next(texts) for _ in value]
    root.write(table, batch, pa.Table.from_pylist(rows, root.read(table, batch).schema))


def _spoiled(name: str, value: str, texts) -> str:
    if name.endswith("_json"):
        return json.dumps(_in_json(json.loads(value), texts))
    if name.endswith("_id") or name in ("kind", "source", "rejected_source", "request_sha"):
        return value
    return next(texts)


def _in_json(value: Any, texts) -> Any:
    """The same shape with hostile text where a session or a model chose the words."""
    if isinstance(value, list):
        return [_in_json(item, texts) for item in value]
    if isinstance(value, dict):
        return {
            key: next(texts)
            if key in ("content", "text", "name", "description") and isinstance(item, str)
            else json.dumps({next(texts): next(texts), "command": next(texts)})
            if key == "arguments"
            else _in_json(item, texts)
            for key, item in value.items()
        }
    return value


def _spoiled_report(report: dict[str, Any], texts) -> dict[str, Any]:
    spoiled = dict(report)
    for name in _COUNTED:
        if isinstance(spoiled.get(name), dict):
            spoiled[name] |= {next(texts): n for n in range(1, 4)}
    for name in ("cost_by_teacher_usd", "teachers"):
        if isinstance(spoiled.get(name), dict):
            spoiled[name] = {next(texts): each for each in spoiled[name].values()}
    if "matrix" in spoiled:
        name = next(texts)
        spoiled["matrix"] = {name: {name: {"rate": 0.5, "n": 2, "n_agree": 1}}}
    for name in ("stop_reason", "recipe"):
        if name in spoiled:
            spoiled[name] = next(texts)
    return spoiled
