import random

import pyarrow.parquet as pq
import pytest

from replay_pipeline.publish import publish
from replay_pipeline.publish.splits import (
    ConversationSplit,
    name_sha,
    position,
    shared,
)
from tests.replay_pipeline.publish.rows import kept_row, kept_table, positives_table


def ids_by_position(n=200):
    return sorted((f"session-{k}" for k in range(n)), key=lambda s: position(name_sha(s)))


def over(names, **others):
    return ConversationSplit.over(names, **{"test_fraction": 0.25, "sides": {}, **others})


def test_the_share_of_test_conversations_is_the_fraction():
    split = over(ids_by_position(2000))
    share = sum(split.of(s) == "test" for s in ids_by_position(2000)) / 2000
    assert share == pytest.approx(0.25, abs=0.03)


def test_when_all_fall_on_one_side_the_nearest_is_put_on_the_other():
    ordered = ids_by_position()
    highest = ordered[-5:]
    split = over(highest)
    assert [split.of(session) for session in highest] == ["test"] + ["train"] * 4
    lowest = ordered[:5]
    split = over(lowest)
    assert [split.of(session) for session in lowest] == ["test"] * 4 + ["train"]


def test_what_was_published_stays_where_it_is_though_the_other_side_is_empty():
    ordered = ids_by_position()
    sides = dict.fromkeys(map(name_sha, ordered[-3:]), "train")
    split = over(ordered[-3:], sides=sides)
    assert {split.of(each) for each in ordered[-3:]} == {"train"}
    split = over(ordered[-4:], sides=sides)
    assert [split.of(each) for each in ordered[-4:]] == ["test", "train", "train", "train"]


def test_two_or_three_that_share_a_message_come_to_one_side_and_follow_what_was_published():
    low, *_, high = ids_by_position()
    split = over([high, low], ties=[[high, low, "message"]])
    assert split.of(low) == split.of(high) == "train"  # by the first of them
    split = over([low], sides={name_sha("message"): "train"}, ties=[[low, "message"]])
    assert split.of(low) == "train"


def test_a_message_ties_two_or_three_conversations_those_published_before_among_them():
    said = {"a": {"m1", "m2"}, "b": {"m2", "m3"}, "c": {"m3"}, "d": {"m3"}, "e": {"m4"}}
    said |= {name: {"m5"} for name in "fghi"}
    assert [*shared(said, {})] == [["a", "b", "m2"], ["b", "c", "d", "m3"]]
    n_published = {name_sha("m1"): 1, name_sha("m2"): 1, name_sha("m3"): 1, name_sha("m4"): 3}
    assert [*shared(said, n_published)] == [["a", "m1"], ["a", "b", "m2"]]


@pytest.mark.slow
@pytest.mark.parametrize(("n_sharing", "is_kept_together"), [(3, True), (4, False)])
def test_what_more_than_three_conversations_share_ties_nobody(
    n_sharing, is_kept_together, tmp_path
):
    """Also where they come one after the other."""
    low = ids_by_position()[:2]
    high = ids_by_position()[-2:]
    names = [*low, *high][-n_sharing:] if n_sharing == 3 else [*low, *high]
    said = {name: ["message"] for name in names}
    for n, name in enumerate([*names[:0], *names]):
        publish(
            [(f"b{n}", kept_table(kept_row(n, session=name)))],
            folder=tmp_path / "set",
            test_fraction=0.25,
            messages=lambda batch: said,
            lengths=[],
        )
    found = sides_of(tmp_path / "set")
    together = {side for name in names[:3] for side in found[name]}
    assert len(together) == 1
    assert (found[names[-1]] <= together) == is_kept_together


def sides_of(folder):
    """The side of each conversation by the rows themselves."""
    found = {}
    for path in folder.rglob("*.parquet"):
        side = path.relative_to(folder).parts[2]
        for name in pq_column(path, "conversation"):
            found.setdefault(name, set()).add(side)
    return found


def pq_column(path, name):
    return pq.read_table(path, columns=[name], partitioning=None)[name].to_pylist()


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "fraction"), [(2, 0.1), (3, 0.5)])
def test_no_conversation_changes_its_side_while_a_dataset_grows(seed, fraction, tmp_path):
    """Of 20 publications some bring new batches, some bring known ones with other rows."""
    drawn = random.Random(seed)
    talks = [f"{drawn.getrandbits(64):016x}" for _ in range(12)]
    folder, known = tmp_path / "set", {}
    for number in range(20):
        batch = f"b{drawn.randrange(8)}"
        rows = []
        for n in range(drawn.randrange(1, 5)):
            talk = drawn.choice(talks)
            part = drawn.choice([talk, f"{talk}.agent-a{n}", f"fork-of-{talk}"])
            rows.append(kept_row(number * 10 + n, session=part) | {"conversation": talk})
        publish(
            [(batch, kept_table(*rows))],
            positives=[(batch, positives_table())],
            folder=folder,
            test_fraction=drawn.choice([fraction, 0.1]),
            lengths=[],
        )
        found = sides_of(folder)
        assert all(len(sides) == 1 for sides in found.values())
        for talk, (side,) in found.items():
            assert known.setdefault(talk, side) == side


def test_what_fell_out_comes_back_to_its_side(tmp_path):
    first, *_ = ids_by_position()[-3:]
    rows = [kept_row(n, session=session) for n, session in enumerate(ids_by_position()[-3:])]
    publish([("b1", kept_table(*rows))], folder=tmp_path / "set")
    assert sides_of(tmp_path / "set")[first] == {"test"}  # put there, by its hash it would not be
    publish([("b1", kept_table(*rows[1:]))], folder=tmp_path / "set")
    publish([("b2", kept_table(rows[0]))], folder=tmp_path / "set")
    assert sides_of(tmp_path / "set")[first] == {"test"}


def test_another_fraction_is_for_what_is_new(tmp_path):
    rows = [kept_row(n, session=f"s-{n}") for n in range(40)]
    publish([("b1", kept_table(*rows[:20]))], folder=tmp_path / "set", test_fraction=0.1)
    before = sides_of(tmp_path / "set")
    publish([("b2", kept_table(*rows[20:]))], folder=tmp_path / "set", test_fraction=0.9)
    after = sides_of(tmp_path / "set")
    assert before.items() <= after.items()
    n_test = sum(after[f"s-{n}"] == {"test"} for n in range(20, 40))
    assert n_test > 15


def test_rows_without_a_session_are_split_by_state(tmp_path):
    rows = [kept_row(n) | {"session_id": None} for n in range(60)]
    report = publish([("b", kept_table(*rows))], folder=tmp_path / "set")
    assert report.rows_by_split["pairs"]["test"] > 3


@pytest.mark.parametrize(
    ("session", "sha", "where"),
    [
        ("session-1", "84097828fc31a8c8d29210df48901a85", 0.5157694912015303),
        (
            "0276a600-2f22-4d2b-844c-3feb9c5aa108",
            "413e664b87a75ada38212d69d03de0dc",
            0.254858392181,
        ),
        ("séance", "3795e14e1453e36a840eab867f23eae3", 0.21713073879466505),
    ],
)
def test_a_conversation_lies_where_it_has_lain_for_ever(session, sha, where):
    """Another hash would move what is new in published datasets from train to test."""
    assert name_sha(session) == sha
    assert position(sha) == pytest.approx(where, rel=1e-11)
    assert ConversationSplit(0.25, {}).of(session) == ("test" if where < 0.25 else "train")
