import json
import re
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planted_secrets import kinds, planted
from replay_pipeline.ingesters.log_rows import Cleaner
from replay_pipeline.redaction.redactor import Redactor, find_secrets, find_secrets_in
from replay_pipeline.redaction.scanning import suspects_in
from replay_pipeline.redaction.secret_rules import SecretHit, own_hits
from tests.replay_pipeline.redaction.made_up import GITHUB


def test_no_planted_secret_of_any_kind_survives():
    texts = list(planted(seed=7))
    assert len(texts) >= 500
    assert len(kinds()) >= 40
    survivors = []
    for p in texts:
        redacted = Redactor().text(p.text)
        survivors += [(p.kind, p.context) for form in p.forms if form in redacted]
    assert survivors == []


def test_the_quick_search_lets_no_secret_pass():
    texts = [p.text for p in planted(seed=8)]
    signals = {index: suspect.signals for index, suspect in suspects_in(texts)}
    for index, text in enumerate(texts):
        assert list(own_hits(text, signals=signals.get(index, ()))) == list(own_hits(text)), text
    assert find_secrets_in(texts) == [find_secrets(text) for text in texts]


def test_a_second_pass_finds_nothing_left():
    for p in planted(seed=9):
        redacted = Redactor().text(p.text)
        assert find_secrets(redacted) == [], (p, redacted)
        assert Redactor().text(redacted) == redacted


def test_equal_secrets_become_equal_placeholders_and_salts_differ():
    redactor = Redactor(salt="one")
    first, second = redactor.text(f"a {GITHUB}"), redactor.text(f"b: {GITHUB}!")
    placeholder = first.removeprefix("a ")
    assert placeholder.startswith("<SECRET:")
    assert second == f"b: {placeholder}!"
    assert Redactor(salt="two").text(f"a {GITHUB}") != first
    assert Redactor(salt="one").text(f"a {GITHUB}") == first


def test_texts_of_several_conversations_are_redacted_each_with_its_own_users():
    redactor = Redactor()
    text = "rebase kimlee/tide onto annabel/tide"
    kim, anna = frozenset({"kimlee"}), frozenset({"annabel"})
    redactor.prepare([text], users=kim)
    assert redactor.text(text, users=kim) == "rebase user/tide onto annabel/tide"
    assert redactor.text(text, users=anna) == "rebase kimlee/tide onto user/tide"


def test_counts_are_by_kind_and_hold_no_values():
    redactor = Redactor()
    for _ in range(2):
        redactor.text(f"key {GITHUB} and mail kim.lee@corp.dev in /Users/kimlee/x")
    assert sum(redactor.counts.values()) == 6
    assert GITHUB not in repr(redactor.counts)
    assert redactor.counts["email"] == redactor.counts["home"] == 2


def test_placeholders_never_change_between_releases():
    redactor = Redactor(salt="shop")
    text = f"{GITHUB} of Kim.Lee@corp.dev (Ana Sousa) on Box.lan, 93.184.216.34 in /Users/kimlee/a"
    assert redactor.text(text, users=frozenset({"Ana Sousa"})) == (
        "<SECRET:github-pat:a10b7e13> of <EMAIL:578b2a07> (<NAME:faebec6c>) on <HOST:56526b06>, "
        "<ADDRESS:1c078a20> in /Users/user/a"
    )
    kinds = ("github-pat", "email", "name", "host", "address", "home")
    assert redactor.counts == dict.fromkeys(kinds, 1)
    assert Redactor().text("mail kim.lee@corp.dev") == "mail <EMAIL:4db3eb7c>"


@pytest.mark.parametrize(
    ("text", "hits"),
    [
        (f"API_TOKEN={GITHUB}", [(10, 50, "assigned-secret")]),
        (f"see {GITHUB}<EMAIL:0a1b2c3d>", [(4, 44, "github-pat")]),
        (f"<EMAIL:0a1b2c3d>{GITHUB}", [(16, 56, "github-pat")]),
        (f"{GITHUB} {GITHUB}", [(0, 40, "github-pat"), (41, 81, "github-pat")]),
        (f"é 🙂 {GITHUB} é", [(4, 44, "github-pat")]),
        (f"é \ud800 {GITHUB} é", [(4, 44, "github-pat")]),
        ("\ud800 API_TOKEN='q7Uxv29K\ud800pw41LmZt8Rb3Yd'", [(13, 36, "assigned-secret")]),
        ("API_TOKEN=<SECRET:assigned-secret:0a1b2c3d>", []),
    ],
)
def test_a_secret_is_found_where_it_begins_and_ends(text: str, hits: list[tuple[int, int, str]]):
    assert find_secrets(text) == [SecretHit(*hit) for hit in hits]


def test_secrets_that_overlap_are_one_of_the_kind_that_begins_first():
    # A value ends after 400 characters; the token that begins in it goes on.
    value = ("q7Uxv29Kpw41LmZt8Rb3Yd" * 20)[:390]
    text = f"API_TOKEN={value}-glpat-a1B2c3D4e5F6g7H8i9J0k1L2m3N4"
    assert set(own_hits(text)) == {
        SecretHit(10, 410, "assigned-secret"),
        SecretHit(401, 435, "gitlab-token"),
    }
    assert find_secrets(text) == [SecretHit(10, 435, "assigned-secret")]


def test_secrets_that_touch_stay_two():
    body = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC\n" * 2
    key = f"-----BEGIN PRIVATE KEY-----\n{body}-----END PRIVATE KEY-----"
    n = len(key)
    assert find_secrets(key + key) == [
        SecretHit(0, n, "private-key"),
        SecretHit(n, 2 * n, "private-key"),
    ]
    assert Redactor().text(key + key) == 2 * Redactor().text(key)


def test_a_secret_with_half_a_character_in_it_goes():
    redacted = Redactor().text("API_TOKEN='q7Uxv29K\ud800pw41LmZt8Rb3Yd'")
    assert re.fullmatch("API_TOKEN='<SECRET:assigned-secret:[0-9a-f]{8}>'", redacted)


@pytest.mark.parametrize(
    ("text", "users", "alone", "kind"),
    [
        ("Ana Sousa@shop.dev", {"Ana Sousa"}, "Sousa@shop.dev", "email"),
        ("Ana Sousa Lind", {"Ana Sousa", "Ana Sousa Lind"}, "Ana Sousa Lind", "name"),
        ("Ana Sousa Lind", {"Ana Sousa", "Sousa Lind"}, "Sousa Lind", "name"),
        ("tlind@shop.dev", {"tlind"}, "tlind@shop.dev", "email"),
        ("Tlind Sousa", {"tlind", "Tlind Sousa"}, "Tlind Sousa", "name"),
        ("ana@Anas-MacBook.fritz.box", set(), "ana@Anas-MacBook.fritz.box", "email"),
        ("Anastasia Sousas-iMac", {"Anastasia Sousas"}, "Sousas-iMac", "host"),
        ("Ana Lind-sousa", {"Ana Lind", "lind-sousa"}, "Ana Lind", "name"),
        ("Ana Sousas-MacBook", {"Ana Sousas"}, "Sousas-MacBook", "host"),
    ],
)
def test_of_what_overlaps_one_placeholder_stands_for_all(
    text: str, users: set[str], alone: str, kind: str
):
    redactor = Redactor()
    placeholder = redactor.text(alone, users=frozenset({alone}))
    assert placeholder.startswith(f"<{kind.upper()}:")
    redactor.counts.clear()
    redacted = redactor.text(f"by {text}, and {text}.", users=frozenset(users))
    assert redacted == f"by {placeholder}, and {placeholder}."
    assert redactor.counts == {kind: 2}


def test_home_folders_of_a_known_user_are_counted_in_the_text_that_has_them():
    redactor = Redactor()
    users = frozenset({"kimlee", "tli"})
    texts = [
        "/Users/kimlee/a /Users/kimlee/b /home/kimlee/c",
        f"nothing but {GITHUB}",
        f"/home/tli/a of kimlee, kim@corp.dev and {GITHUB} in /Users/kimlee/d",
        "nothing at all",
        "/home/tli/a or /home/other",
    ]
    redactor.prepare(texts, users=users)
    secret, mail = "<SECRET:github-pat:808d9ef3>", Redactor().text("kim@corp.dev")
    expected = [
        ("/Users/user/a /Users/user/b /home/user/c", {"home": 3}),
        (f"nothing but {secret}", {"github-pat": 1}),
        (
            f"/home/user/a of user, {mail} and {secret} in /Users/user/d",
            {"home": 2, "user_name": 1, "email": 1, "github-pat": 1},
        ),
        ("nothing at all", {}),
        ("/home/user/a or /home/user", {"home": 2}),
    ]
    for text, (redacted, counts) in zip(texts, expected, strict=True):
        redactor.counts.clear()
        assert redactor.text(text, users=users) == redacted
        assert redactor.counts == counts


def test_a_login_name_at_the_end_of_a_home_folder_is_counted_once():
    redactor = Redactor()
    assert redactor.text("cd /Users/tlind", users=frozenset({"tlind"})) == "cd /Users/user"
    assert redactor.counts == {"home": 1}


def test_preparing_many_texts_gives_what_one_by_one_gives():
    texts = [p.text for p in planted(seed=10)] + ["plain", "/home/kimlee/a"] * 3
    one_by_one = [Redactor().text(text) for text in texts]
    redactor = Redactor()
    redactor.prepare(texts)
    assert [redactor.text(text) for text in texts] == one_by_one


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/Users/kimlee/shop/a.py", "/Users/user/shop/a.py"),
        ("/home/kimlee", "/home/user"),
        (r"C:\Users\kimlee\shop", r"C:\Users\user\shop"),
        (r'{"p": "C:\\Users\\kimlee"}', r'{"p": "C:\\Users\\user"}'),
        ("~/.claude/projects/-Users-kimlee-shop/x", "~/.claude/projects/-Users-user-shop/x"),
        ("/home/ubuntu/app", "/home/ubuntu/app"),
        ("/home/node/app", "/home/node/app"),
    ],
)
def test_home_folders_lose_the_login_name(text: str, expected: str):
    assert Redactor().text(text) == expected


def test_a_known_login_name_is_replaced_where_it_is_an_account():
    users = frozenset({"kimlee"})
    text = "kimlee@box:~$ git checkout kimlee/fix\n-rw-r--r-- 1 kimlee staff 12 kimlees akimlee.py"
    assert Redactor().text(text, users=users) == (
        "user@box:~$ git checkout user/fix\n-rw-r--r-- 1 user staff 12 kimlees akimlee.py"
    )


@pytest.mark.parametrize(
    "text",
    [
        "Co-Authored-By: Claude <noreply@anthropic.com>",
        "git@github.com:acme/shop.git",
        "mail jane@example.com",
        "npm install react@18.2.0 @types/node@20",
        "no-reply@shop.dev, Git@shop.dev, x@a.example.com, x@shop.test, x@GitLab.com",
    ],
)
def test_public_addresses_stay(text: str):
    assert Redactor().text(text) == text


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("x@b.co", "<EMAIL>"),
        ("xgit@shop.dev y@examples.com z@mail.github.com", "<EMAIL> <EMAIL> <EMAIL>"),
        ("a1@b.com.x@c.dev", "<EMAIL>.x@c.dev"),
        ("a1@b.com,x@c.dev", "<EMAIL>,<EMAIL>"),
        ("x" * 64 + "@b.com", "<EMAIL>"),
        ("x" * 65 + "@b.com", "x" * 65 + "@b.com"),
        ("é" + "x" * 64 + "@b.com", "é" + "x" * 64 + "@b.com"),
        (" " + "x" * 64 + "@b.com", " <EMAIL>"),
    ],
)
def test_a_mail_address_ends_where_it_ends(text: str, redacted: str):
    assert re.sub(r":[0-9a-f]{8}>", ">", Redactor().text(text)) == redacted


def test_mail_addresses_are_mapped_consistently():
    redactor = Redactor()
    a, b = redactor.text("From: Kim.Lee@corp.dev"), redactor.text("to kim.lee@corp.dev,")
    assert a.removeprefix("From: ") == b.removeprefix("to ").rstrip(",")
    assert a.startswith("From: <EMAIL:")


@pytest.mark.parametrize(
    "text",
    [
        "password = get_password(user)",
        "token: str | None = None",
        'api_key = os.environ["API_KEY_2"]',
        "const token = await getToken2(session.user1)",
        "PASSWORD=${DB_PASSWORD_1}",
        "password=$PASSWORD_FILE1",
        "token = tokens[position1 + 1]",
        'password: "your-password-123"',
        "postgres://user:password@localhost:5432/db",
        "Authorization: Bearer <token>",
        "commit 4f2a9c1d8e7b6a5f4c3d2e1f0a9b8c7d6e5f4a3b",
        "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "uuid 0f8fad5b-d9cb-469f-a165-70867728950e",
        "/src/components/TokenProvider/useTokenRefresh.test.tsx",
        "hf_hub_download_with_progress_and_retry_v2",
        "npm_config_registry_and_other_settings_1",
        "task-based-on-something as-of-yesterday-afternoon",
        "max_tokens=4096, n_tokens: 128000",
        "<SECRET:github-token:0a1b2c3d> and <EMAIL:0a1b2c3d>",
    ],
)
def test_ordinary_code_is_left_alone(text: str):
    assert find_secrets(text) == []


def test_secrets_in_call_arguments_are_found_in_every_string():
    arguments = json.dumps({"env": {"A": [f"x={GITHUB}"]}, GITHUB: 1, "n": 2})
    cleaned = Cleaner(Redactor(), frozenset()).arguments(arguments)
    assert GITHUB not in cleaned
    assert msgspec.json.decode(cleaned)["n"] == 2


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=300), st.integers(0, 10**6))
def test_any_text_is_read_and_a_secret_in_it_goes(text: str, seed: int):
    position = Random(seed).randint(0, len(text))
    whole = f"{text[:position]} {GITHUB} {text[position:]}"
    redacted = Redactor().text(whole)
    assert GITHUB not in redacted
    for hit in find_secrets(whole):
        assert 0 <= hit.start < hit.end <= len(whole)


def test_texts_prepared_in_many_pieces_are_redacted_as_one_by_one():
    log = "line of a log\n" * 20_000
    texts = [f"{log}{GITHUB} number {n}" for n in range(6)] * 2
    redactor = Redactor()
    redactor.prepare(texts)
    prepared = [redactor.text(text) for text in texts]
    assert prepared == [Redactor().text(text) for text in texts]
    assert not any(GITHUB in text for text in prepared)
    assert redactor.counts.total() == len(texts)


def test_values_behind_text_that_is_not_ascii_are_found_in_each_of_many_texts():
    secret = "q7Uxv29Kpw41LmZt8Rb3Yd"
    texts = [f"{'é → 🙂 ' * n}API_TOKEN={secret}{n:03} at 93.184.216.{n} 🙂" for n in range(1, 200)]
    redactor = Redactor()
    redactor.prepare(texts)
    for number, text in enumerate(texts, 1):
        clean = redactor.text(text)
        assert secret not in clean
        assert f"216.{number} " not in clean
        assert clean == Redactor().text(text)
