"""Which of many texts may hold what must go, and where in them."""

import base64

import pytest
from kingfisher_sdk import Rules

from replay_pipeline.redaction.scanning import (
    AWS_SESSION_TOKEN,
    OF_NAMED_FILES,
    Suspect,
    people_in,
    secrets_by_kingfisher,
    suspects_in,
)
from replay_pipeline.redaction.secret_rules import SecretHit
from tests.replay_pipeline.redaction.made_up import GITHUB, VALUE

SUSPECTS: dict[str, Suspect | None] = {
    "plain text": None,
    f"é 🙂 box.lan é API_TOKEN={VALUE} on box.lan": Suspect(
        {"assigned"}, [(19, 47)], False, [(7, 11), (54, 58)]
    ),
    GITHUB: Suspect({"token"}, [], True, []),
    "": None,
    "é 93.184.216.34": Suspect(set(), [], False, [(3, 14)]),
    f"API_TOKEN={VALUE}": Suspect({"assigned"}, [(5, 33)], False, []),
    "it is 50%41 off": Suspect({"percent"}, [], False, []),
    "-----BEGIN PRIVATE KEY-----": Suspect({"key"}, [], False, []),
    "curl -u kim:hH7gg2kLmQ9x": Suspect({"line"}, [], True, []),
    f"?a={GITHUB}&b": Suspect({"token", "cut"}, [], True, []),
    base64.b64encode(f"token {GITHUB} it is".encode()).decode(): Suspect({"base64"}, [], False, []),
}
"""What each text may hold, when it is searched with the others."""
EXPECTED = [(n, suspect) for n, suspect in enumerate(SUSPECTS.values()) if suspect]


def test_many_texts_are_searched_together_and_each_suspicion_is_of_its_text():
    assert list(suspects_in(list(SUSPECTS))) == EXPECTED
    assert list(suspects_in([])) == []


def test_what_reaches_into_the_next_text_makes_both_suspect():
    texts = ["é", "é API_TOKEN=", VALUE, "plain"]
    assert list(suspects_in(texts)) == [
        (1, Suspect({"assigned"}, [(7, 38)], False, [])),
        (2, Suspect({"assigned"}, [(0, 23)], False, [])),
    ]


@pytest.mark.parametrize(
    ("text", "hits"),
    [
        (f"é 🙂 {GITHUB} é", [(4, 44, "github-pat")]),
        (f"\ud800 {GITHUB}", [(2, 42, "github-pat")]),
        ("postgres://kim:hH7gg2kLmQ9x@db.shop.dev/x", [(15, 27, "generic-credential-uri")]),
        ("postgres://kim:Postgres@db.shop.dev/x", []),
        (f"aws_secret_access_key = {VALUE}{VALUE[:17]}\n", []),  # half a secret, without its id
        (base64.b64encode(f"token {GITHUB} it is".encode()).decode(), []),
    ],
)
def test_the_scanner_tells_characters_and_kinds(text: str, hits: list[tuple[int, int, str]]):
    assert secrets_by_kingfisher(text) == [SecretHit(*hit) for hit in hits]


def test_rules_that_are_left_out_ask_for_a_file_and_the_replaced_one_is_kingfishers():
    rules = Rules()
    assert all(rules.detail(name)["path"] for name in OF_NAMED_FILES)
    kingfishers = rules.detail(AWS_SESSION_TOKEN["id"])
    assert kingfishers["pattern"].replace("{16,2048}", "{16,}") == AWS_SESSION_TOKEN["pattern"]
    for ours, its in zip(
        AWS_SESSION_TOKEN["depends_on_rule"], kingfishers["depends_on_rule"], strict=True
    ):
        assert its == {**ours, "optional": False}


def test_every_text_begins_a_line():
    told = "[tlind/fix 1a2b3c4] Fix the cart"
    assert people_in([told]) == people_in(["plain", told]) == {"tlind/"}


def test_text_with_half_a_character_is_searched_for_people():
    assert people_in(["\ud800 /home/kimlee/a", "\ud800 author:\ttlind\n"]) == {"~kimlee", "tlind"}
