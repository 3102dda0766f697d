import pytest

from replay_pipeline.publish import publish
from replay_pipeline.publish.publisher import read_manifests
from replay_pipeline.publish.splits import SessionSplit, position, session_sha


def ids_by_position(n=200):
    return sorted((f"session-{k}" for k in range(n)), key=lambda s: position(session_sha(s)))


def over(sessions, **others):
    return SessionSplit.over(sessions, **{"test_fraction": 0.25, "pins": {}, **others})


def test_the_share_of_test_sessions_is_the_fraction():
    split = over(ids_by_position(2000))
    share = sum(split.of(s) == "test" for s in ids_by_position(2000)) / 2000
    assert share == pytest.approx(0.25, abs=0.03)
    assert not split.pins


def test_when_all_fall_on_one_side_the_nearest_is_pinned_to_the_other():
    ordered = ids_by_position()
    highest = ordered[-5:]
    split = over(highest)
    assert [split.of(session) for session in highest] == ["test"] + ["train"] * 4
    lowest = ordered[:5]
    split = over(lowest)
    assert [split.of(session) for session in lowest] == ["test"] * 4 + ["train"]


def test_one_session_or_no_fraction_pins_nothing():
    (last,) = ids_by_position()[-1:]
    assert over([last]).of(last) == "train"
    assert {over(ids_by_position(), test_fraction=0.0).of(s) for s in ids_by_position()} == {
        "train"
    }


def test_a_pin_lasts_when_other_sessions_come(tmp_path, kept_table, make_kept):
    ordered = ids_by_position()
    folder = tmp_path / "set"
    first = [make_kept(n, session=session) for n, session in enumerate(ordered[-3:])]
    publish([("b1", kept_table(*first))], folder=folder)
    (pin,) = read_manifests(folder)["b1"]["pins"]
    assert pin == session_sha(ordered[-3])
    grown = [make_kept(10, session=ordered[-3]), make_kept(11, session=ordered[0])]
    publish([("b2", kept_table(*grown))], folder=folder)
    manifests = read_manifests(folder)
    assert set(manifests["b2"]["sessions"]["test"]) == {pin, session_sha(ordered[0])}
    publish([("b3", kept_table(make_kept(12, session=ordered[-4])))], folder=folder)
    assert read_manifests(folder)["b3"]["pins"] == {}


def test_rows_without_a_session_are_split_by_state(tmp_path, kept_table, make_kept):
    rows = [make_kept(n) | {"session_id": None} for n in range(60)]
    report = publish([("b", kept_table(*rows))], folder=tmp_path)
    assert report.rows_by_split["pairs"]["test"] > 5


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
def test_a_session_lies_where_it_has_lain_for_ever(session, sha, where):
    """Another hash would move sessions of published datasets from train to test."""
    assert session_sha(session) == sha
    assert position(sha) == pytest.approx(where, rel=1e-11)
    assert SessionSplit(0.25, {}).of(session) == ("test" if where < 0.25 else "train")
