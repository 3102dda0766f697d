import json

import pytest

from replay_pipeline import DJNormalizer
from replay_pipeline.errors import ConfigError, PublishError, SchemaError, SecretFoundError
from replay_pipeline.publish import publish, retract
from replay_pipeline.publish.folder import file_contents, list_files
from replay_pipeline.publish.version import read_manifests
from tests.replay_pipeline.publish.rows import kept_row, kept_table, positives_table


def snapshot(folder):
    return file_contents(folder, "")


def test_publishing_again_changes_nothing(tmp_path):
    batches = [("b1", kept_table(*range(10))), ("b2", kept_table(*range(10, 20)))]
    positives = [("b2", positives_table(50, 51))]
    first = publish(batches, folder=tmp_path / "set", positives=positives)
    before = snapshot(tmp_path / "set")
    second = publish(batches, folder=tmp_path / "set", positives=positives)
    assert first.files_written == sorted(before)
    assert (second.files_written, second.files_removed) == ([], [])
    assert snapshot(tmp_path / "set") == before
    assert first.tag == second.tag
    assert first.rows_by_split == second.rows_by_split
    assert json.dumps(first.to_json())
    assert {path.name for path in tmp_path.iterdir()} == {"set", ".set.lock"}


def test_a_changed_batch_replaces_its_own_files_only(tmp_path):
    folder = tmp_path / "set"
    publish([("b1", kept_table(1, 2, 3)), ("b2", kept_table(4, 5, 6))], folder=folder)
    (folder / "NOTES.txt").write_text("mine")
    before = snapshot(folder)
    report = publish([("b2", kept_table(4, 5))], folder=folder)
    after = snapshot(folder)
    assert sum(report.rows_by_split["pairs"].values()) == 5
    assert report.files_removed
    assert all("/b2/" in path for path in report.files_removed)
    assert after["NOTES.txt"] == b"mine"
    assert {path: data for path, data in after.items() if "b1" in path} == {
        path: data for path, data in before.items() if "b1" in path
    }


def test_a_planted_secret_stops_everything(tmp_path):
    folder = tmp_path / "set"
    publish([("b1", kept_table(1, 2, 3))], folder=folder)
    before = snapshot(folder)
    secret = "ghp_" + "16C7e42F292c6912E7710c838347Ae178B4a"
    told = [{"role": "user", "content": f"use {secret} to log in"}]
    bad = kept_row(9, state_messages_json=json.dumps(told))
    with pytest.raises(SecretFoundError, match=r"batch b2, pairs, state state-9, prompt") as caught:
        publish([("b2", kept_table(8, bad))], folder=folder)
    assert secret not in str(caught.value)
    assert snapshot(folder) == before
    with pytest.raises(SecretFoundError, match=r"_card\.json"):
        publish([("b2", kept_table(8))], folder=folder, card_facts={"notes": secret})
    assert snapshot(folder) == before


@pytest.mark.parametrize("key", ["", "../up", "a/b", ".hidden", "a" * 101, "b 1"])
def test_a_batch_key_that_is_no_folder_name_is_refused(tmp_path, key):
    with pytest.raises(ConfigError, match="trace batch"):
        publish([(key, kept_table(1))], folder=tmp_path / "set")
    assert list(tmp_path.iterdir()) == []


def test_large_batches_are_written_as_several_shards(tmp_path, monkeypatch):
    folder = tmp_path / "set"
    monkeypatch.setattr("replay_pipeline.publish.layout.MAX_SHARD_BYTES", 20_000)
    publish([("b", kept_table(*range(100)))], folder=folder)
    shards = [path for path in list_files(folder) if path.startswith("data/pairs/train")]
    assert len(shards) > 1
    rows = read_manifests(folder)["b"]["files"]["pairs"]
    assert sum(sum(counts.values()) for counts in rows.values()) == 100


def pairs_of_sessions(n):
    return [
        {
            "state_id": f"s{number}",
            "session_id": f"session-{number}",
            "state_messages": [{"role": "user", "content": f"Test {number} fails."}],
            "chosen": f"I read test {number}.",
            "rejected": "I edit at once.",
            "n_teachers_agreeing": 2,
        }
        for number in range(n)
    ]


def test_pairs_are_published_as_the_normalizer_returns_them(tmp_path):
    pairs = DJNormalizer("none").normalize(pairs_of_sessions(8))
    report = publish(pairs, folder=str(tmp_path / "set"))
    assert sum(report.rows_by_split["pairs"].values()) == 8
    again = publish(pairs[:3], folder=tmp_path / "set")
    assert sum(again.rows_by_split["pairs"].values()) == 3


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (pairs_of_sessions(1), "normalize"),
        ([{"state_id": "s1", "chosen": "a"}], "state_messages"),
        (["a pair"], "neither a pair nor a batch"),
    ],
)
def test_what_is_no_normalized_pair_is_refused_with_what_to_call(tmp_path, given, word):
    with pytest.raises(SchemaError, match=word):
        publish(given, folder=tmp_path / "set")


def test_a_dataset_of_another_version_is_refused_and_stays(tmp_path):
    folder = tmp_path / "set"
    publish([("b1", kept_table(*range(3)))], folder=folder)
    manifest = folder / "manifests" / "b1.json"
    manifest.write_text(manifest.read_text().replace('"layout": 6', '"layout": 5'))
    before = snapshot(folder)
    for change in (
        lambda: publish([("b2", kept_table(4))], folder=folder),
        lambda: retract(folder=folder, batches=["b1"]),
    ):
        with pytest.raises(PublishError, match=r"another version .* publish to a new place"):
            change()
    assert snapshot(folder) == before
