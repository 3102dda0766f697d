import errno
from concurrent.futures import ThreadPoolExecutor

import pytest

from replay_pipeline.errors import StorageError
from replay_pipeline.publish import folder as room
from replay_pipeline.publish import publish
from replay_pipeline.publish.folder import file_contents, replace_files
from replay_pipeline.publish.version import read_manifests
from tests.replay_pipeline.publish.rows import kept_table


def test_files_are_written_kept_and_removed(tmp_path):
    target = tmp_path / "set"
    replace_files(target, {"a": b"1", "sub/b": b"2"}, set())
    change = replace_files(target, {"a": b"1", "c": b"3"}, {"sub/b", "never/there"})
    assert (change.written, change.unchanged, change.removed) == (["c"], ["a"], ["sub/b"])
    assert file_contents(target, "") == {"a": b"1", "c": b"3"}


def test_a_folder_of_data_goes_with_its_last_file_and_other_folders_stay(tmp_path):
    target = tmp_path / "set"
    replace_files(target, {"data/pairs/train/a/1.parquet": b"1", "data/pairs/b": b"2"}, set())
    (target / ".git" / "refs").mkdir(parents=True)
    (target / "link").symlink_to("data")
    replace_files(target, {"c": b"3"}, {"data/pairs/train/a/1.parquet"})
    assert not (target / "data" / "pairs" / "train").exists()
    assert (target / ".git" / "refs").is_dir()
    assert (target / "link").readlink().as_posix() == "data"
    assert (target / "data" / "pairs" / "b").read_bytes() == b"2"


def test_a_full_disk_leaves_the_old_version(tmp_path, monkeypatch):
    target = tmp_path / "set"
    replace_files(target, {"a": b"old"}, set())

    def full(path, data):
        path.write_bytes(data[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(room, "_write", full)
    with pytest.raises(StorageError, match=r"No space left.*the dataset is as before"):
        replace_files(target, {"a": b"new"}, set())
    assert file_contents(target, "") == {"a": b"old"}
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        replace_files(tmp_path / "file" / "set", {"a": b"1"}, set())


def test_where_folders_cannot_be_exchanged_they_are_renamed(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "_exchange", lambda *_: False)
    target = tmp_path / "set"
    replace_files(target, {"a": b"1"}, set())
    replace_files(target, {"a": b"2"}, set())
    assert file_contents(target, "") == {"a": b"2"}
    assert list(tmp_path.iterdir()) == [target]


def test_what_a_killed_publisher_took_away_is_put_back(tmp_path):
    target = tmp_path / "set"
    replace_files(target, {"a": b"1"}, set())
    target.rename(tmp_path / ".set.old-1234")
    (tmp_path / ".set.next-99").mkdir()
    room.recover(target)
    assert file_contents(target, "") == {"a": b"1"}
    assert list(tmp_path.iterdir()) == [target]


def test_without_hard_links_files_are_copied(tmp_path, monkeypatch):
    def no_links(*_, **__):
        raise OSError(errno.EPERM, "not here")

    target = tmp_path / "set"
    replace_files(target, {"a": b"1"}, set())
    monkeypatch.setattr(room.os, "link", no_links)
    replace_files(target, {"b": b"2"}, set())
    assert file_contents(target, "") == {"a": b"1", "b": b"2"}


def test_publishers_to_one_folder_take_turns(tmp_path):
    def work(number):
        rows = kept_table(*range(number * 3, number * 3 + 3))
        return publish([(f"b{number}", rows)], folder=tmp_path / "set")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert set(read_manifests(tmp_path / "set")) == {f"b{number}" for number in range(8)}
    assert {path.name for path in tmp_path.iterdir()} == {"set", ".set.lock"}
