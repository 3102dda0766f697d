"""Pairs are ordered for review by what they weigh and how doubtful they are."""

import json

from replay_pipeline.review import doubts, rank_pairs, review_score, write_review

PLAIN = {
    "state_id": "s",
    "state_messages": [],
    "chosen": "a",
    "rejected": "b",
    "n_teachers_agreeing": 3,
    "source": "consensus",
    "margin": 2,
    "n_against": 1,
    "weight": 1.0,
}


def pair(name, **more):
    return {**PLAIN, "pair_id": name, "state_id": name, **more}


def test_what_counts_much_and_may_be_wrong_comes_first():
    ordered = [
        pair("bare majority", margin=0, n_against=2),
        pair("control left too", control_mismatch=True),
        pair("margin of one", margin=1, weight=0.9),
        pair("plain"),
        pair("said by the record", evidence=["rejection"]),
        pair("light", margin=0, weight=0.05),
    ]
    assert rank_pairs(ordered[::-1]) == ordered
    assert review_score(pair("heavy", weight=2.0)) == 2 * review_score(PLAIN)


def test_each_doubt_is_named_and_raises_the_score():
    plain = review_score(PLAIN)
    for more in (
        {"source": "rewind"},
        {"control_mismatch": True},
        {"agreement_level": "target"},
        {"agreement_level": "tool"},
        {"shares_vendor": True},
        {"n_against": 2},
    ):
        assert len(doubts({**PLAIN, **more})) == 1
        assert review_score({**PLAIN, **more}) > plain
    assert doubts(PLAIN) == []


def test_the_page_gives_each_pair_its_place(tmp_path):
    pairs = [pair("sure", margin=5), pair("doubtful", margin=0)]
    page = write_review(pairs, path=tmp_path / "review.html").read_text("utf-8")
    data = page.split('id="data">')[1].split("</script>")[0]
    scores = {item["id"]: item["score"] for item in json.loads(data)["items"]}
    assert scores["doubtful"] == review_score(pairs[1]) > scores["sure"]
