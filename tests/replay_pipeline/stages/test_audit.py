"""Every audit is quiet on good data and finds the bad data it is there for."""

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replay_pipeline.errors import CheckFailedError, SchemaError, SecretFoundError
from replay_pipeline.stages.audit import dataset, tables
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.stages.receipts import Receipt
from replay_pipeline.storage.tables import DataRoot
from tests.roots import pipeline_at

KEY = "ghp_" + "wJ4kTq9ZxR2mVb7NcY5sLd8PfG3hAe6Uo1Ki"


@pytest.fixture
def work(published, tmp_path) -> Pipeline:
    root = tmp_path / "data"
    shutil.copytree(published, root)
    return pipeline_at(root)


def replaced(root: DataRoot, name: str, batch: str, change) -> None:
    """Write a table with its rows changed, as a bug in a stage would."""
    rows = root.read(name, batch).to_pylist()
    root.write(name, batch, pa.Table.from_pylist(change(rows), root.read(name, batch).schema))


def first(**fields):
    return lambda rows: [{**rows[0], **fields}, *rows[1:]]


ALL_OF_TABLES = [
    tables.whole_states,
    tables.faithful_prefixes,
    tables.answers_of_states,
    tables.sides_differ,
    tables.kept_or_dropped,
]
ALL_OF_RECEIPTS = [
    tables.rows_accounted,
    tables.budget_kept,
]
ALL_OF_DATASETS = [
    dataset.shared_conversations,
    dataset.shared_messages,
]


@pytest.mark.slow
def test_good_data_has_no_problem_and_is_counted(work):
    batches, folder = work.batches(), work.settings.dataset_dir()
    verdicts = [look(work.root, batches) for look in ALL_OF_TABLES]
    verdicts += [look(work.root, batches) for look in ALL_OF_RECEIPTS]
    verdicts += [look(folder) for look in ALL_OF_DATASETS]
    for verdict in verdicts:
        assert verdict.holds
        assert verdict.judged is not None
        assert verdict.message().startswith("Judged nothing" if verdict.judged == 0 else "")
        assert verdict.judged or verdict.message()
        assert not (verdict.judged and verdict.message())
        assert any(isinstance(value, int | float) for value in verdict.facts.values())
    tables.refuse_unfit(work.root, batches)


@pytest.mark.parametrize(
    ("look", "table", "change", "message"),
    [
        (tables.whole_states, "states", lambda rows: [rows[0], *rows], "1 repeated, first cc1_"),
        (tables.whole_states, "states", first(session_id="?"), "1 without its session or turn"),
        (tables.whole_states, "turns", lambda rows: rows[:1], "without its session or turn"),
        (
            tables.faithful_prefixes,
            "states",
            lambda rows: [{**row, "fidelity": 0.5} for row in rows],
            "% of the prefixes have the recorded length",
        ),
        (
            tables.answers_of_states,
            "teacher_actions",
            first(state_id="x"),
            "1 of no state, first x",
        ),
        (
            tables.answers_of_states,
            "teacher_actions",
            lambda rows: [rows[0], *rows],
            "1 answered twice, first cc1_",
        ),
        (
            tables.answers_of_states,
            "teacher_actions",
            first(action_text=None, error_code=None),
            "1 with neither an action nor a reason",
        ),
        (
            tables.answers_of_states,
            "teacher_actions",
            first(cost_usd=-1.0),
            "1 with a cost below 0",
        ),
        (tables.sides_differ, "dpo_pairs", first(chosen=""), "1 with an empty or equal side"),
        (tables.sides_differ, "dpo_pairs", first(rejected=None), "1 with an empty or equal side"),
        (
            tables.sides_differ,
            "dpo_pairs",
            first(chosen="same", rejected="same"),
            "1 with an empty or equal side",
        ),
        (
            tables.sides_differ,
            "dpo_pairs",
            first(n_teachers_agreeing=9),
            "more votes than teachers",
        ),
        (tables.kept_or_dropped, "normalized_pairs", lambda rows: rows[1:], "neither kept nor"),
        (tables.kept_or_dropped, "normalized_pairs", first(state_id="x"), "that came from nowhere"),
    ],
)
def test_a_broken_table_is_found_and_the_batch_is_named(work, look, table, change, message):
    batch = work.batches()[0]
    replaced(work.root, table, batch, change)
    verdict = look(work.root, work.batches())
    assert not verdict.holds
    assert message in verdict.message()
    assert verdict.is_warning or f"batch {batch}" in verdict.message()
    assert verdict.message().endswith(verdict.what_to_do)
    assert look(work.root, work.batches()[1:]).holds or look is tables.faithful_prefixes


def test_a_pair_dropped_without_a_reason_is_found(work):
    batch = work.batches()[0]
    (kept, *rest) = work.root.read("normalized_pairs", batch).to_pylist()
    schema = work.root.read("dropped_pairs", batch).schema
    dropped = pa.Table.from_pylist([{name: kept.get(name) for name in schema.names}], schema)
    work.root.write("dropped_pairs", batch, dropped)
    replaced(work.root, "normalized_pairs", batch, lambda _: rest)
    assert "1 dropped without a reason" in tables.kept_or_dropped(work.root, [batch]).message()


def test_a_damaged_table_is_not_published(work):
    work.root.part("dpo_pairs", work.batches()[0]).write_bytes(b"not parquet")
    with pytest.raises(SchemaError, match="not a readable parquet file"):
        tables.refuse_unfit(work.root, work.batches())


def test_rows_without_a_reason_and_money_over_the_ceiling_are_found(work):
    batch = work.batches()[0]
    for stage, fields, look, message in (
        ("ingest", {"rows_used": 1}, tables.rows_accounted, "neither used nor skipped"),
        ("replay", {"max_total_usd": 1e-6}, tables.budget_kept, "USD spent of 0.0000"),
    ):
        receipt = work.receipts.read(stage, batch)
        report = {**receipt.report, **fields}
        work.receipts.write(
            Receipt(stage=stage, batch=batch, version=1, report=report, seconds=0.0)
        )
        assert message in look(work.root, work.batches()).message()


@pytest.mark.slow
def test_an_unfit_batch_is_published_by_no_way(work):
    batch = work.batches()[0]
    before = {p: p.read_bytes() for p in work.settings.dataset_dir().rglob("*.parquet")}
    replaced(work.root, "normalized_pairs", batch, first(chosen="", state_id="x"))
    with pytest.raises(CheckFailedError, match="neither kept nor dropped"):
        work.publish()
    assert {p: p.read_bytes() for p in work.settings.dataset_dir().rglob("*.parquet")} == before


# The dataset


def shard(work: Pipeline, split: str = "train", config: str = "pairs") -> Path:
    return sorted((work.settings.dataset_dir() / "data" / config / split).rglob("*.parquet"))[0]


def rewritten(path: Path, change) -> None:
    table = pq.read_table(path, partitioning=None)
    pq.write_table(pa.Table.from_pylist(change(table.to_pylist()), table.schema), path)


def test_a_conversation_in_both_splits_is_found(work):
    name = pq.read_table(shard(work, "test"), partitioning=None)["conversation"][0].as_py()
    rewritten(shard(work), first(conversation=name))
    verdict = dataset.shared_conversations(work.settings.dataset_dir())
    assert f"conversation {name} is in both splits" in verdict.message()
    assert not verdict.is_warning


@pytest.mark.slow
def test_a_secret_that_was_not_redacted_stops_the_publication(work):
    batch = work.batches()[0]
    replaced(work.root, "normalized_pairs", batch, first(hint=f"token {KEY}"))
    with pytest.raises(SecretFoundError, match="holds a secret"):
        work.publish()
