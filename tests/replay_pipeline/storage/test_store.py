"""The data root anywhere: paths, atomic writes and versions of the dataset, without a network."""

import json
from pathlib import Path
from uuid import uuid4

import pytest

from replay_pipeline.errors import ConfigError, StorageError, UntrustedError
from replay_pipeline.publish import local_copy, newest, publish, to_be_published
from replay_pipeline.settings import Settings
from replay_pipeline.stages.receipts import Receipt, Receipts, now
from replay_pipeline.storage.store import (
    as_path,
    copy_files,
    files_below,
    read_files,
    written_whole,
)
from replay_pipeline.storage.tables import DataRoot, table_of
from tests.full_tables import full_table
from tests.trainer.diloco.bucket_servers import GoogleStorage


@pytest.fixture
def bucket() -> Path:
    return as_path(f"memory://{uuid4().hex}/root")


def test_a_place_is_a_folder_or_a_url():
    assert as_path("data") == Path("data")
    assert as_path("file:///srv/data") == Path("/srv/data")
    assert str(as_path("memory://bucket/root/")) == "memory://bucket/root"


def test_a_scheme_that_nobody_speaks_is_told_with_what_works():
    with pytest.raises(ConfigError, match=r"floppy://.*s3://"):
        as_path("floppy://disk/root")
    with pytest.raises(ConfigError, match="data_dir"):
        Settings.load(changes={"data_dir": "floppy://disk/root"}, env={})


def test_tables_and_receipts_lie_on_a_store_as_in_a_folder(bucket, tmp_path):
    table = table_of([{"state_id": "s"}], "outcomes")
    for root in (tmp_path, bucket):
        DataRoot(root).write("outcomes", "b1", table)
        Receipts(root).write(Receipt(stage="pairs", batch="b1", version=1, report={}, seconds=1.0))
    assert DataRoot(bucket).read("outcomes", "b1").equals(table)
    assert DataRoot(bucket).batches("outcomes") == ["b1"]
    assert not DataRoot(bucket).has("outcomes", "b2")
    assert files_below(bucket) == files_below(tmp_path)
    for name in files_below(bucket):
        there, here = (bucket / name).read_bytes(), (tmp_path / name).read_bytes()
        if name.endswith(".json"):
            there, here = ({**json.loads(text), "at": None} for text in (there, here))
        assert there == here


def test_a_receipt_written_again_is_new_and_one_that_was_not_is_reused(bucket):
    receipts = Receipts(bucket)
    old = Receipt(stage="pairs", batch="old", version=1, report={}, seconds=1.0)
    receipts.write(old)
    before = now()
    receipts.write(Receipt(stage="pairs", batch="new", version=1, report={}, seconds=1.0))
    assert {r.batch: r.is_reused for r in receipts.all(since=before)} == {"old": True, "new": False}


def test_many_files_are_read_in_order_and_a_missing_one_is_none(bucket, tmp_path):
    for root in (tmp_path, bucket):
        for name in ("b", "a"):
            with written_whole(root / "x" / name) as file:
                file.write(name.encode())
        assert read_files(root / "x", ["b", "none", "a"]) == [b"b", None, b"a"]
        assert read_files(root / "y", []) == []


def test_a_write_that_fails_on_the_way_leaves_the_object_as_it_was(bucket):
    with written_whole(bucket / "a.json") as file:
        file.write(b"old")

    def fail():
        with written_whole(bucket / "a.json") as file:
            file.write(b"half of the n")
            raise RuntimeError("power")

    with pytest.raises(RuntimeError):
        fail()
    assert (bucket / "a.json").read_bytes() == b"old"
    assert files_below(bucket) == ["a.json"]


def test_what_must_be_new_is_never_replaced(bucket, tmp_path):
    for root in (bucket, tmp_path):
        with written_whole(root / "mark", is_new=True) as file:
            file.write(b"mine")
        with pytest.raises(FileExistsError), written_whole(root / "mark", is_new=True) as file:
            file.write(b"theirs")
        assert (root / "mark").read_bytes() == b"mine"
        assert files_below(root) == ["mark"]


def test_a_remote_root_needs_a_folder_here_for_the_ledger_and_says_so(bucket, tmp_path):
    env = {"REPLAY_DATA": str(bucket)}
    with pytest.raises(ConfigError, match="REPLAY_HOME"):
        Settings.load(env=env).ledger_url()
    at_home = Settings.load(env={**env, "REPLAY_HOME": str(tmp_path)})
    assert at_home.ledger_url() == str(tmp_path / "ledger.sqlite")
    assert at_home.training_dir() == tmp_path / "model"
    assert str(at_home.dataset_dir()) == f"{bucket}/dataset"
    on_a_server = Settings.load(env=env, changes={"replay": {"ledger": "postgresql://db/ledger"}})
    assert on_a_server.ledger_url() == "postgresql://db/ledger"
    assert Settings.load(data_dir=tmp_path, env={}).local_dir() == tmp_path


def test_settings_in_a_remote_root_are_refused_and_the_root_is_kept_as_it_is_written(bucket):
    settings = Settings.load(env={"REPLAY_DATA": str(bucket)})
    assert json.loads(settings.model_dump_json())["data_dir"] == str(bucket)
    (bucket / "settings.toml").write_bytes(b"[replay]\nmax_total_usd = 1.5\n")
    with pytest.raises(UntrustedError, match="REPLAY_SETTINGS"):
        Settings.load(env={"REPLAY_DATA": str(bucket)})


# The dataset


def rows(*numbers: int):
    return [
        (
            "b1",
            full_table(
                [
                    {
                        "state_id": f"state-{number}",
                        "session_id": f"session-{number}",
                        "state_messages_json": '[{"role": "user", "content": "Why?"}]',
                        "chosen_messages_json": '[{"role": "assistant", "content": "Read it."}]',
                        "rejected_messages_json": '[{"role": "assistant", "content": "Guess."}]',
                        "tools_json": "[]",
                        "stats_json": "{}",
                        "is_distillable": True,
                    }
                    for number in numbers
                ],
                "normalized_pairs",
            ),
        )
    ]


def publish_at(place: Path, copy: Path, *numbers: int) -> None:
    with to_be_published(place, copy) as folder:
        publish(rows(*numbers), folder=folder)


def test_a_dataset_on_a_store_is_byte_equal_to_one_in_a_folder(bucket, tmp_path):
    place = bucket / "dataset"
    for numbers in ((1, 2, 3), (1, 2, 3, 4)):
        publish_at(place, tmp_path / "copy", *numbers)
        publish_at(tmp_path / "here", tmp_path / "unused", *numbers)
    there = newest(place)
    assert there is not None
    assert there.name.startswith("000002-")
    assert files_below(there) == files_below(tmp_path / "here")
    for name in files_below(there):
        assert (there / name).read_bytes() == (tmp_path / "here" / name).read_bytes()


def test_another_machine_reads_and_continues_what_one_published(bucket, tmp_path):
    place = bucket / "dataset"
    publish_at(place, tmp_path / "one", 1, 2, 3)
    publish_at(place, tmp_path / "two", 1, 2, 3, 4)
    copy = local_copy(place, tmp_path / "one")
    current = newest(place)
    assert current is not None
    assert files_below(copy) == files_below(current)
    assert (copy / "README.md").read_bytes() == (current / "README.md").read_bytes()


def test_publishing_the_same_again_makes_no_version(bucket, tmp_path):
    place = bucket / "dataset"
    publish_at(place, tmp_path / "copy", 1, 2, 3)
    before = files_below(place)
    publish_at(place, tmp_path / "copy", 1, 2, 3)
    assert files_below(place) == before


def test_of_two_publishers_one_wins_and_the_other_is_told(bucket, tmp_path):
    place = bucket / "dataset"
    publish_at(place, tmp_path / "copy", 1, 2, 3)

    def lose():
        with to_be_published(place, tmp_path / "slow") as folder:
            publish(rows(1, 2, 3, 4), folder=folder)
            publish_at(place, tmp_path / "fast", 1, 2, 3, 5)
            theirs.update(files_below(place))

    theirs: set[str] = set()
    with pytest.raises(StorageError, match="somebody else published version 2"):
        lose()
    assert set(files_below(place)) == theirs


def test_a_publisher_that_dies_leaves_the_old_version_and_its_rest_is_cleared(
    bucket, tmp_path, monkeypatch
):
    place = bucket / "dataset"
    publish_at(place, tmp_path / "copy", 1, 2, 3)
    current = newest(place)

    def die(source, target, names):
        copy_files(source, target, list(names)[:1])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("replay_pipeline.publish.folder.copy_files", die)
        with pytest.raises(KeyboardInterrupt):
            publish_at(place, tmp_path / "other", 1, 2)
    assert newest(place) == current
    for numbers in ((1, 2, 4), (1, 2, 5), (1, 2, 6)):
        publish_at(place, tmp_path / "copy", *numbers)
    kept = {name.split("/")[0][:6] for name in files_below(place)}
    assert kept == {"000003", "000004"}


@pytest.mark.slow
def test_google_storage_holds_tables_by_the_same_code(monkeypatch):
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    server = GoogleStorage()
    try:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        root = DataRoot(as_path("gs://bucket/root"))
        table = table_of([{"state_id": "s"}], "outcomes")
        root.write("outcomes", "b1", table)
        assert root.read("outcomes", "b1").equals(table)
        assert root.batches("outcomes") == ["b1"]
        with written_whole(root.path / "mark.json", is_new=True) as file:
            file.write(b"mine")
        with (
            pytest.raises(FileExistsError),
            written_whole(root.path / "mark.json", is_new=True) as file,
        ):
            file.write(b"theirs")
        assert (root.path / "mark.json").read_bytes() == b"mine"
    finally:
        server.close()
