"""A rehearsal: one's own sessions go the whole way without a key, and nothing of it passes for data."""

from collections import Counter

import pyarrow.parquet as pq
import pytest

from replay_pipeline.cli.console import open_words
from replay_pipeline.errors import PublishError
from replay_pipeline.stages.budget.spending import estimate_replay
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.stages.views.page import write_page_of
from replay_pipeline.stages.views.status import status_of
from replay_pipeline.stages.views.summary import summary_of
from tests.full_tables import full_table
from tests.roots import PROJECT, pipeline_at
from tests.support.pages import data_of
from tests.support.settings_files import write_settings

TOKEN = "hf_rehearsal_token"
REPO = "me/pairs"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A data root that a rehearsal has taken as far as pairs."""
    folder = tmp_path_factory.mktemp("rehearsal") / "root"
    write_settings(
        folder,
        ingest={"sources": [PROJECT], "max_batch_sessions": 4},
        replay={"rehearsal_teachers": True, "gates": []},
        normalize={"recipe": "none"},
    )
    work = pipeline_at(folder)
    for batch in work.ingest_new():
        work.replay(batch)
        work.pairs(batch)
        work.normalize(batch)
    return folder


@pytest.fixture
def to_hub(monkeypatch):
    """Settings that publish to a repository, and a Hub that must not even be asked."""

    def refuse(*_, **__):
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr("replay_pipeline.publish.hub.HubDataset.exists", refuse)
    monkeypatch.setattr("replay_pipeline.publish.hub.HubDataset.ensure", refuse)
    monkeypatch.setattr("replay_pipeline.publish.hub.HubDataset.commit", refuse)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return {"publish": {"repo_id": REPO}}


def refuses(work: Pipeline) -> None:
    with pytest.raises(PublishError, match="made up in a rehearsal"):
        work.publish()


@pytest.mark.slow
def test_a_rehearsal_makes_agreements_pairs_and_disputes_for_nothing(root):
    work = pipeline_at(root)
    outcomes = work.root.read_all("outcomes")["outcome"].to_pylist()
    assert {"pair", "agreement", "no_consensus"} <= set(outcomes)
    assert outcomes.count("pair") >= 5
    assert status_of(work)["ledger"]["spent_usd"] == 0
    assert status_of(work)["played"] == "rehearsal"
    assert estimate_replay(work).expected_usd == 0


@pytest.mark.slow
def test_answers_of_a_rehearsal_are_in_no_sum_of_real_ones(root):
    """Whoever the teachers of the settings are: the answers tell."""
    played = pipeline_at(root)
    n_states = len(played.root.read_all("states"))
    n_made_up = sum(row["action_text"] is not None for row in
                    played.root.read_all("teacher_actions").to_pylist())  # fmt: skip
    for work in (played, pipeline_at(root, replay={"rehearsal_teachers": False})):
        status, summary = status_of(work), summary_of(work, since="")
        assert [row.keys() & {"replay", "rehearsal"} for row in status["batches"].values()] == [
            {"rehearsal"} for _ in work.batches()
        ]
        for told in (status["open"], summary["open"]):
            assert told["n_states_never_asked"] == n_states > 0
            assert (told["n_answers"], told["stop_reasons"]) == (0, {})
            assert told["n_rehearsed"] == n_made_up
        assert (summary["answers"], summary["calls"], summary["failed_calls"]) == (0, 0, 0)
        assert summary["rehearsed_answers"] == n_made_up
        words = open_words(status["open"])
        asked_nobody = f"no real teacher was asked at {n_states:,} states"
        ceiling = f"; a run pays at most ${work.settings.replay.max_total_usd:.2f} for them"
        assert words == asked_nobody + ceiling


@pytest.mark.slow
def test_tables_page_and_card_say_that_it_is_play(root, tmp_path):
    work = pipeline_at(root)
    answers = work.root.read_all("teacher_actions").to_pylist()
    assert {row["provider"] for row in answers} == {"rehearsal"}
    assert {row["model"].partition("/")[0] for row in answers} == {"rehearsal"}
    with_votes = [r for r in work.root.read_all("dpo_pairs").to_pylist() if r["teachers_agreeing"]]
    assert {row["source"] for row in with_votes} == {"rehearsal"}
    for row in [*with_votes, *work.root.read_all("positives").to_pylist()]:
        assert all(name.startswith("rehearsal") for name in row["teachers_agreeing"])
    figures = write_page_of(work, tmp_path / "look")
    data = data_of(tmp_path / "look")
    shown = [item for item in data["pairs-1"]["items"] if item.get("source") == "rehearsal"]
    assert shown
    assert all("made up in a rehearsal" in item["doubts"] for item in shown)
    assert figures["teachers"]["played"] == [t["teacher"] for t in data["teachers"]["teachers"]]
    work.publish()
    card = (root / "dataset" / "README.md").read_text("utf-8")
    assert "**A rehearsal: the answers behind" in card
    shards = [*(root / "dataset" / "data" / "prompts").rglob("*.parquet")]
    kinds = Counter(kind for path in shards for kind in pq.read_table(path)["kind"].to_pylist())
    assert kinds["agreement"] > 0
    assert kinds.total() > kinds["agreement"], "states with a pair are prompts too"
    assert "nothing to train on" in card
    n_made_up = sum(row["action_text"] is not None for row in answers)
    assert f"| answers made up in a rehearsal | {n_made_up} |" in card
    assert "| answers of teachers |" not in card


@pytest.mark.slow
def test_a_rehearsal_is_not_published_to_the_hub(root, to_hub, tmp_path):
    changes = {"publish": {**to_hub["publish"], "folder": tmp_path / "set"}}
    refuses(pipeline_at(root, **changes))
    assert not (tmp_path / "set").exists()


def test_a_batch_of_play_among_real_ones_keeps_all_of_them_back(root, to_hub, tmp_path):
    """Neither mixed into one publication nor left in the folder by an earlier one."""
    from replay_pipeline.publish import publish

    work = pipeline_at(root)
    batch = work.batches()[0]
    play = work.root.read("normalized_pairs", batch)
    real = full_table([], "normalized_pairs")
    hub = {"repo_id": REPO, "token": TOKEN}
    prompts = {"prompts": work.prompts, "folder": tmp_path / "set"}
    with pytest.raises(PublishError, match="made up"):
        publish([("real", real), (batch, play)], **hub, **prompts)
    publish([(batch, play)], **prompts)
    with pytest.raises(PublishError, match="made up"):
        publish([("real", real)], **hub, **prompts)
