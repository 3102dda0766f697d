"""What the stage that makes pairs takes from elsewhere: marks of a person, and a control run."""

import json

import pytest

from replay_pipeline.stages.budget.spending import estimate_replay
from replay_pipeline.stages.pages.pairs import FORMAT
from replay_pipeline.stages.views.page import compare, contents_of
from tests.roots import pipeline_at, sample_root


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A data root with pairs of a part of the sample."""
    root = tmp_path_factory.mktemp("root")
    work = sample_root(root, n_batch_sessions=16, gates=[])
    work.find_batches()
    batch = work.batches()[0]
    work.ingest(batch)
    work.replay(batch)
    work.pairs(batch)
    return root


def test_a_second_export_of_marks_keeps_those_before(root, tmp_path):
    """A pair that was rejected is in no table any more; its mark counts on all the same."""
    work = pipeline_at(root)
    [batch] = work.receipts.reports("pairs")
    pairs = [row["pair_id"] for row in work.root.read("dpo_pairs", batch).to_pylist()]
    assert len(pairs) > 2
    marks = tmp_path / "marks.json"
    said = {pairs[0]: "reject", pairs[1]: "accept"}
    chances = dict.fromkeys(said, 0.25)
    marks.write_text(json.dumps({"format": FORMAT, "marks": said, "chances": chances}), "utf-8")
    work = pipeline_at(root, pairs={"marks": marks})
    assert work.pairs(batch).report["n_rejected_in_review"] == 1
    first, *others = contents_of(work).pairs
    assert first["marks"] == said
    shown = {item["pair"] for item in first["items"]}
    assert shown
    assert not shown & said.keys()
    assert first["chances"].keys() == shown | said.keys()
    assert all(0.25 <= first["chances"][key] <= 1 for key in said)
    assert all(other["marks"] == said for other in others)


def test_an_estimate_believes_checked_pairs_more_than_votes(root, tmp_path):
    work = pipeline_at(root)
    [batch] = work.receipts.reports("pairs")
    work.pairs(batch)
    pairs = [row["pair_id"] for row in work.root.read("dpo_pairs", batch).to_pylist()]
    for n, is_enough in ((4, False), (8, True)):
        marks = {"format": FORMAT, "marks": dict.fromkeys(pairs[:n], "reject")}
        (tmp_path / "marks.json").write_text(json.dumps(marks), "utf-8")
        checked = pipeline_at(root, pairs={"marks": tmp_path / "marks.json"})
        checked.pairs(batch)
        told, *_ = estimate_replay(checked, [batch]).words
        assert told.startswith(f"by {n} checked pairs, ") == is_enough


def test_by_default_the_same_pairs_cost_less_than_asking_everybody(root, tmp_path):
    sample_root(tmp_path, n_batch_sessions=16)
    work = pipeline_at(tmp_path)
    assert work.settings.replay.gates == ("wide_first:0.1",)
    work.find_batches()
    first = work.batches()[0]
    work.ingest(first)
    bought = work.replay(first).report
    work.pairs(first)
    everybody = pipeline_at(root)
    [batch] = everybody.receipts.reports("pairs")
    everybody.pairs(batch)  # without the marks of another test
    asked = everybody.receipts.read("replay", batch).report
    pairs = [
        {row["pair_id"] for row in each.root.read("dpo_pairs", key).to_pylist()}
        for each, key in ((work, first), (everybody, batch))
    ]
    assert pairs[0] == pairs[1]
    assert bought["spent_usd"] < 0.9 * asked["spent_usd"]


def compared(folder, gate):
    """Replay the sample with a gate; give the comparison of its teachers."""
    sample_root(folder, n_batch_sessions=16)
    work = pipeline_at(folder, replay={"gates": (gate,)})
    work.find_batches()
    batch = work.batches()[0]
    work.ingest(batch)
    work.replay(batch)
    return compare(work)


def test_a_comparison_weighs_the_decisions_that_a_gate_asked_on_at_by_chance(root, tmp_path):
    """Without the weights, teachers that were asked later would seem to do otherwise more often."""
    every = compare(pipeline_at(root))
    drawn = compared(tmp_path, "cheap_first:0.4")
    assert "not all were put to everybody" not in drawn["caveat"]
    assert "these answers stand for the others" in drawn["caveat"]
    assert "these answers stand for the others" not in every["caveat"]
    true = {each["teacher"]: each["share_alike"] for each in every["teachers"]}
    n_states = max(each["n"] for each in drawn["teachers"])
    fewer = [each for each in drawn["teachers"] if each["n"] < n_states]
    assert fewer
    for each in fewer:
        low, high = each["interval"]
        assert low < true[each["teacher"]] < high
        plain = (each["n_same"] + each["n_equal"]) / (
            each["n_same"] + each["n_equal"] + each["n_other"]
        )
        assert plain < each["share_alike"]
