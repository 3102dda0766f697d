import json
import re
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planted_secrets import kinds, planted
from replay_pipeline.ingesters.log_rows import Cleaner
from replay_pipeline.redaction import secret_rules
from replay_pipeline.redaction.people import user_of
from replay_pipeline.redaction.redactor import Redactor, find_secrets, find_secrets_in
from replay_pipeline.redaction.scanning import secrets_by_kingfisher, suspects_in
from replay_pipeline.redaction.secret_rules import load_rules, own_hits

GITHUB = "ghp_" + "a1B2c3D4e5F6" * 3


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


def test_what_the_scanner_finds_is_named_after_its_rule():
    named = {hit.kind for p in planted(seed=7) for hit in secrets_by_kingfisher(p.text)}
    assert {"github-pat", "gitlab-pat", "slack-bot-token", "groq-api-key"} <= named
    assert not {kind for kind in named if not re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", kind)}
    assert "secret" not in named


_ADDRESS = re.compile(
    r"(?<![\w.+%/:-])[A-Za-z0-9][A-Za-z0-9._%+-]{0,63}@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,24}(?![\w@])"
)
_PIECES = [
    "a",
    "b1",
    ".",
    "@",
    "-",
    "%",
    "+",
    "/",
    ":",
    " ",
    "\n",
    "é",
    "x.co",
    "q" * 60,
    "@corp.dev",
]


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(st.lists(st.sampled_from(_PIECES), max_size=14).map("".join))
def test_an_address_is_found_from_its_host_as_one_rule_would_find_it(text):
    redacted = Redactor().text(text)
    assert re.split(r"<EMAIL:[0-9a-f]{8}>", redacted) == _ADDRESS.split(text) or len(text) < 6


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


def test_user_of_a_working_directory():
    assert user_of("/Users/kimlee/shop") == "kimlee"
    assert user_of("/home/runner/work") is None
    assert user_of("/srv/app") is None
    assert user_of(None) is None


@pytest.mark.parametrize(
    "text",
    [
        "Co-Authored-By: Claude <noreply@anthropic.com>",
        "git@github.com:acme/shop.git",
        "mail jane@example.com",
        "npm install react@18.2.0 @types/node@20",
    ],
)
def test_public_addresses_stay(text: str):
    assert Redactor().text(text) == text


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


BUNDLED = (Path(secret_rules.__file__).parent / "secret_rules.toml").read_text("utf-8")


@pytest.mark.parametrize(
    ("find", "put", "said"),
    [
        ('kind = "jwt"', 'kind = "J W T"', "regex"),
        ("[0-9a-f]{40}", "[0-9a-f", "unterminated"),
        ("literals = ", "literal = ", "unknown field"),
        ('literals = ["eyJ"]', "literals = []", "length"),
        ("(?P<secret>", "(?P<value>", "secret"),
        (r"signal = '''earer", r"signal = '''(?=x)earer", "look-around"),
    ],
)
def test_a_rule_that_cannot_work_is_refused_when_the_rules_are_loaded(find, put, said):
    with pytest.raises(ValueError, match=said):
        load_rules(BUNDLED.replace(find, put))


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
