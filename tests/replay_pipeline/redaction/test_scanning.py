"""Which of many texts may hold what must go, and where in them."""

import base64

import pytest

from replay_pipeline.redaction import scanning
from replay_pipeline.redaction.scanning import (
    Suspect,
    _kind_of,
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


@pytest.mark.parametrize("n_bytes", [0, 10, 75])
def test_texts_searched_in_several_rounds_keep_their_numbers(monkeypatch, n_bytes: int):
    monkeypatch.setattr(scanning, "_BLOB_BYTES", n_bytes)
    assert list(suspects_in(list(SUSPECTS))) == EXPECTED


def test_texts_are_searched_once_more_are_together_than_fit(monkeypatch):
    rounds = []
    spans = scanning._spans

    def recorded(data: bytes):
        rounds.append(data)
        return spans(data)

    monkeypatch.setattr(scanning, "_BLOB_BYTES", 8)
    monkeypatch.setattr(scanning, "_spans", recorded)
    assert list(suspects_in(["abcde", "fgh", "ijklm", "n"])) == []
    assert rounds == [b"abcde\n\n\nfgh\n\n\n", b"ijklm\n\n\nn\n\n\n"]


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


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ("betterleaks.github-pat", "github-pat"),
        ("betterleaks.pinecone-api-key.2", "pinecone-api-key"),
        ("kingfisher.aws.12", "aws"),
        ("acme.internal.tokens.3", "tokens"),
        ("acme.internal.tokens", "tokens"),
        ("github.4", "github"),
        ("github", "github"),
        ("Acme.Some_Rule (v2)", "some-rule-v2"),
        ("acme.(x)", "x"),
        ("acme.--", "secret"),
    ],
)
def test_a_kind_is_the_name_of_a_rule_without_its_number(rule: str, kind: str):
    assert _kind_of(rule) == kind


def test_people_are_looked_for_in_many_texts_at_once(monkeypatch):
    together = []

    def recorded(text: str, pieces: str) -> frozenset[str]:
        together.append(text)
        return frozenset()

    monkeypatch.setattr(scanning, "names_in", recorded)
    people_in(["a" * 20, "b" * 20, "c", "d" * 40, "e", "f"])
    assert [text.split() for text in together] == [
        ["a" * 20, "b" * 20, "c", "d" * 40, "e", "f"],
    ]
    together.clear()
    monkeypatch.setattr(scanning, "_PEOPLE_CHARS", 40)
    people_in(["a" * 20, "b" * 20, "c", "d" * 40, "e", "f"])
    assert [text.split() for text in together] == [
        ["a" * 20, "b" * 20, "c"],
        ["d" * 40, "e"],
        ["f"],
    ]


def test_every_text_begins_a_line():
    told = "[tlind/fix 1a2b3c4] Fix the cart"
    assert people_in([told]) == people_in(["plain", told]) == {"tlind/"}


def test_a_name_is_read_with_the_240_bytes_that_follow():
    names = ", ".join(f"@person{number}" for number in range(10, 40))
    found = people_in([f"Thanks {names}, and @somebody-else"])
    # "Thanks " and 21 names of 11 characters with their commas fill 238 of them.
    assert {f"person{number}" for number in range(10, 31)} <= found
    assert not {"person32", "somebody-else"} & found


def test_text_with_half_a_character_is_searched_for_people():
    assert people_in(["\ud800 /home/kimlee/a", "\ud800 author:\ttlind\n"]) == {"~kimlee", "tlind"}
