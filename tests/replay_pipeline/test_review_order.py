"""Pairs are ordered for review by how much is open about them."""

from replay_pipeline.stages.pages.pairs import portion, rank_pairs, review_score

PLAIN = {
    "state_id": "s",
    "state_messages": [],
    "chosen": "a",
    "rejected": "b",
    "n_teachers_agreeing": 3,
    "source": "consensus",
    "margin": 2,
    "n_against": 1,
    "p_better": 0.95,
}


def pair(name, **more):
    return {**PLAIN, "pair_id": name, "state_id": name, **more}


def test_the_most_open_comes_first_and_the_checked_last():
    ordered = [
        pair("coin", p_better=0.5),
        pair("likelier", p_better=0.8),
        pair("likely wrong", p_better=0.1),
        pair("plain"),
        pair("checked", p_better=0.5, is_checked_right=True),
    ]
    assert rank_pairs(ordered[::-1]) == ordered
    assert review_score({**PLAIN, "p_better": None}) == 1


def test_the_page_gives_each_pair_its_place():
    pairs = [pair("sure", p_better=0.99), pair("doubtful", p_better=0.6)]
    scores = {item["id"]: item["score"] for item in portion("two", pairs)["items"]}
    assert scores["doubtful"] == review_score(pairs[1]) > scores["sure"]
