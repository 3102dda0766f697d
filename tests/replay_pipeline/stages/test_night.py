"""The morning's figures, and the plan for the night."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from replay_pipeline.ingesters import TraceBatch, write_manifest
from replay_pipeline.ingesters.base import SourceSlice
from replay_pipeline.ingesters.batches import ReadMark
from replay_pipeline.replay.buy.estimates import Estimate, TeacherEstimate
from replay_pipeline.settings import Settings
from replay_pipeline.stages.budget.spending import (
    as_checked,
    estimate_replay,
    fitting,
    words_beforehand,
)
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.stages.receipts import Receipt
from replay_pipeline.stages.views import summary
from replay_pipeline.stages.views.status import status_of
from replay_pipeline.stages.views.summary import night_of, night_words
from tests.roots import pipeline_at, project_root

NOW = datetime(2026, 5, 2, 2, tzinfo=UTC)
PAID = {"newly_spent_usd": 0.0, "unknown_usd": 0.0}


def receipt(stage: str, batch: str, *, hours: float = 1.0, **report: Any) -> Receipt:
    at = (NOW + timedelta(hours=hours)).isoformat()
    return Receipt(stage=stage, batch=batch, version=1, report=report, seconds=0.0, at=at)


@pytest.fixture
def work(tmp_path):
    made = Pipeline(Settings(data_dir=tmp_path))
    for i in range(6):
        source = SourceSlice(tmp_path / f"{i}.jsonl", 0, 1000, "")
        cursor = ReadMark(source.path, 1000, 1000, 0, "")
        write_manifest(TraceBatch(f"2026-01-0{i + 1}-0001-aaaaaa", (source,), (cursor,)), tmp_path)
    return made


def test_only_what_was_done_this_night_counts(work, monkeypatch):
    for each in (
        receipt("ingest", "a", n_sessions=3, n_states=30),
        receipt("ingest", "old", hours=-5, n_sessions=9, n_states=90),
        receipt("replay", "a", n_sent=60, n_answers=58, n_failed=2, stop_reason="budget",
                errors={"rate_limited": 2}, is_complete=False),
        receipt("pairs", "a", n_pairs=7, n_lessons=4, n_agreement=9),
        receipt("normalize", "a", n_kept=5, n_dropped=2, dropped={"text_length_filter": 2}),
    ):  # fmt: skip
        work.receipts.write(each, at=each.at)
    monkeypatch.setattr(summary, "spent_since", lambda *_, **__: 1.25)
    night = night_of(work, since=NOW, failures=[{"run": "r"}])
    expected = {"sessions": 3, "calls": 60, "pairs": 7, "pairs_kept": 5, "batches_open": 6,
                "runs_failed": 1, "dropped": {"text_length_filter": 2}}  # fmt: skip
    assert {key: night[key] for key in expected} == expected
    words = night_words(night)
    assert "$1.25 of $5.00" in words
    assert "4 lessons, 9 confirmed actions, and 7 pairs, 5 of them kept" in words
    assert "replay.max_nightly_usd" in words
    assert "tried again next night" in words


def test_without_history_every_batch_is_planned(work):
    assert fitting(work, work.batches(), max_total_usd=0.01) == work.batches()


def test_as_many_batches_are_planned_as_the_money_is_likely_to_reach(work):
    first, *rest = work.batches()
    report = {"is_complete": True, "spent_usd": 1.0, "n_states": 100, **PAID}
    work.receipts.write(receipt("replay", first, **report))
    far_apart = [rest[i] for i in (0, 2, 4)]
    assert fitting(work, rest, max_total_usd=2.0) == far_apart
    assert fitting(work, rest, max_total_usd=0.01) == rest[:1], "at least one goes on"
    work.receipts.write(receipt("replay", rest[0], is_complete=False, spent_usd=0.9, **PAID))
    assert len(fitting(work, rest, max_total_usd=2.0)) == 4, "what is paid is not paid again"


def test_batches_are_planned_from_as_many_projects_as_there_is_money_for(tmp_path):
    """Twelve projects side by side, each dearer than the night: before, the first had all of it."""
    work = Pipeline(Settings(data_dir=tmp_path))
    for i in range(25):
        path = tmp_path / "projects" / f"project-{max(0, i - 13)}" / f"{i}.jsonl"
        source, cursor = SourceSlice(path, 0, 1000, ""), ReadMark(path, 1000, 1000, 0, "")
        write_manifest(
            TraceBatch(f"2026-01-{i + 1:02d}-0001-aaaaaa", (source,), (cursor,)), tmp_path
        )
    first, *rest = work.batches()
    report = {"is_complete": True, "spent_usd": 10.0, "n_states": 200, **PAID}
    work.receipts.write(receipt("replay", first, **report))

    def planned(usd: float) -> list[int]:
        return [work.batches().index(key) for key in fitting(work, rest, max_total_usd=usd)]

    assert {max(0, i - 13) for i in planned(5.0)} == set(range(12))
    assert len(planned(5.0)) == 12, "no more than one of each, since the money is short"
    assert len(planned(1.0)) == 5, "a share is worth opening a batch for"


def ingested(folder: Path) -> tuple[Pipeline, list[str]]:
    """A data root whose batches nobody was asked about; everybody is asked, until the money ends."""
    work = project_root(folder, gates=[])
    work.find_batches()
    batches = work.batches()
    for batch in batches:
        work.ingest(batch)
    assert len(batches) > 1
    return work, batches


@pytest.mark.slow
def test_money_for_a_part_reaches_every_batch_of_a_run(tmp_path):
    """Before, the first batches in order had all of it."""
    work, batches = ingested(tmp_path)
    everything = estimate_replay(work, batches).expected_usd
    replay = work.replay_within(everything / 3, batches=batches)
    reports = [replay(batch).report for batch in batches]
    assert all(report["n_answers"] for report in reports)
    assert sum(report["newly_spent_usd"] for report in reports) <= everything / 3
    assert {report["stop_reason"] for report in reports} == {"budget"}
    for report in reports:
        counts = report["asked_by"]["projects"]
        assert len(counts) == report["coverage"]["projects"]["all"]
        assert sum(counts.values()) == report["coverage"]["states"]["asked"]


def test_checked_pairs_outweigh_what_votes_promise():
    """Three teachers that share their mistakes agree, and look right to one another."""
    seen = Estimate(n_states=9, n_calls=9, expected_usd=1, bound_usd=2, teachers=(), words=("buy",))
    tally = {"family": "qwen", "n_asked": 9, "n_valid": 9, "n_with_student": 3, "cost_usd": 0.1}
    kinds = {"accuracy_by_kind": {}, "accuracy": {"qwen": 0.36, "agent": 0.92}}
    checked = {"n_checked": 40, "low": 0.1, "high": 0.35}
    report = {"precision": checked, "reliability": kinds, "teachers": {"qwen": tally}}
    found = as_checked(seen, [report])
    assert found.words == (
        "by 40 checked pairs, 10% to 35% of the pairs are right, your best teacher in 36%, and that "
        "model in 92%",
        "don't buy: where they differ from that model they are mostly wrong",
    )
    assert found.pairs_right == (0.1, 0.35)
    assert as_checked(seen, []) == seen


def test_before_anybody_was_asked_prices_say_whether_teachers_may_be_weaker():
    teacher = TeacherEstimate(
        teacher="glm", model="z-ai/glm-4.6", n_calls=10, n_prompt_tokens=1_000_000,
        n_cached_tokens=0, n_completion_tokens=100_000, expected_usd=0.5, bound_usd=1.0,
        price_source="", price_date="",
    )  # fmt: skip
    found = Estimate(n_states=10, n_calls=10, expected_usd=0.5, bound_usd=1, teachers=(teacher,))
    scores, compared, advice = words_beforehand(
        found, {"claude-opus-4-5-20251101": 8, "claude-haiku-4-5": 2}
    )
    assert "no score of glm is known" in scores
    assert compared == (
        "glm, your dearest teacher, costs $0.50; the same calls of claude-opus-4-5-20251101, which "
        "wrote 8 of 10 states, would cost $7.50"
    )
    assert "weaker" in advice
    assert "120 states" in advice
    unknown, _, advice = words_beforehand(found, {"claude-3-haiku": 9})  # $0.38: no such doubt
    assert unknown.endswith("is not known")
    assert "weaker than" not in advice
    unknown, advice = words_beforehand(found, {"a model of nobody's list": 9})
    assert unknown.endswith("is not known")


@pytest.mark.slow
def test_replays_at_once_with_ceilings_above_the_nights_spend_what_the_night_has(tmp_path):
    max_usd = 0.01
    work = project_root(tmp_path, gates=[])
    work.find_batches()
    batches = work.batches()[:2]
    for batch in batches:
        work.ingest(batch)

    def replay(batch: str) -> Receipt:
        mine = pipeline_at(tmp_path, replay={"max_nightly_usd": max_usd})
        return mine.replay_within(1.0, night="2026-01-02")(batch)

    with ThreadPoolExecutor(2) as threads:
        done = list(threads.map(replay, batches))
    ledger = status_of(work)["ledger"]
    (night,) = [each for each in ledger["scopes"] if each["scope"] == "night:2026-01-02"]
    assert night["limit_usd"] == max_usd
    assert 0 < night["spent_usd"] <= max_usd
    assert night["spent_usd"] == pytest.approx(ledger["spent_usd"])
    assert night["held_usd"] == 0
    assert "budget" in {receipt.report["stop_reason"] for receipt in done}
