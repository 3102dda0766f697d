"""What our own rules take for a secret, and where it begins and ends."""

import base64
from urllib.parse import quote

import pytest

from replay_pipeline.redaction.secret_rules import (
    is_random,
    own_hits,
)
from tests.replay_pipeline.redaction.made_up import GITHUB, VALUE

PASSWORD = "hH7gg2kLmQ9x"


def found(text: str, **options: object) -> list[tuple[str, str]]:
    """What is found in a text, in its order: as it stands there, and its kind."""
    hits = sorted(own_hits(text, **options))
    return [(text[hit.start : hit.end], hit.kind) for hit in hits]


@pytest.mark.parametrize(
    ("value", "is_secret"),
    [
        # From 20 characters on: letters, a digit and 3.3 bits.
        ("q7Uxv29Kpw41LmZt8-Rb", True),
        ("Q7UXV29KPW41LMZT8-RB", True),
        ("q7uxv29kpw41lmzt8-rb", True),
        ("qkUxvzdKpwtyLmZtg-Rb", False),
        ("7!29#41$83%65&07*19?", False),
        ("q7w2e4r8t1" * 2, True),  # 3.32 bits
        ("q7w2e4r8t" * 3, False),  # 3.17 bits
        ("q7Uxv29Kpw41LmZxxxxt8Rb", False),
        ("q7Uxv29Kpw41Lm-changeme", False),
        # From 14 on: two digits, no sign and 3.1 bits.
        ("q7Uxv29Kpw41Lm", True),
        ("q7Uxv29Kpw41L", False),
        ("q7Uxvzkpwyfj2m", True),
        ("q7Uxvzkpwyfjtm", False),
        ("q7Uxv29Kpw41LmZt8-R", False),
        ("q7Uxv29Kpw41LmZt8aR", True),
        ("72941836507219", False),
        ("q7w2e4r8t" * 2, True),  # 3.17 bits
        ("q7w2e4r8" * 2, False),  # 3 bits
        # Hexadecimal: 24 digits, or groups with a colon, and 2.9 bits.
        ("0123abcd" * 3, True),  # 3 bits
        ("012abcd" * 4, False),  # 2.81 bits
        ("1f3a5c7e9b2d4f6a8c0e1b3", False),
        ("1f3a5c7e9b2d4f6a8c0e1b3d", True),
        ("1F3A5C7E9B2D4F6A8C0E1B3D", True),
        ("1f3a5c7e:9b2d4f6a", True),
        ("1f3a5c7e-9b2d4f6a", False),
        ("172935461802946753810275", False),
        # Words and names, where they are half of a value: here with 9 of 20 characters.
        ("con7ten8ser9q2z5v1k4", False),
        ("con7ten8sr9q2z5v1k4w", True),
        ("con7tent8q2z5v", False),
        ("con7txq8tez9q2z5v1k4", True),  # half of the pairs are common
        ("con7ten8tez9q2z5v1k4", False),
        ("CON7TEN8SER9Q2Z5V1K4", False),
        ("Controller2Handle3", False),
        ("useTokenRefreshHandler2", False),
    ],
)
def test_a_value_is_random_from_a_length_and_a_number_of_bits_on(value: str, is_secret: bool):
    assert is_random(value) is is_secret


@pytest.mark.parametrize(
    ("value", "is_secret"),
    [
        ("hH7gw2k!", True),
        ("hH7gw2!", False),
        ("hH7gg2kLmQ9x", True),
        ("hh7gg2klmq9x", False),
        ("hh7gg2kl!q9x", True),
        ("HH7GG2KL!Q9X", True),
        ("HH7GG2KLMQ9X", False),
        *((f"hh7gg2kl{sign}q9x", False) for sign in "_-./:"),
        ("hHaggbkLm!Qcx", False),
        ("aB3dE6g" * 2, True),  # 2.81 bits
        ("aB3dE6" * 2, False),  # 2.58 bits
        ("aB3dE6aB3dE", False),
        ("A1F3C5E7b9d2", True),
        ("Kim2Lee.shop.dev", False),
        ("Kim2Lee.shop.develop", True),
        ("your-hH7gg2kLmQ9x", False),
        ("hH7gg2kL***", False),
    ],
)
def test_a_password_has_three_kinds_of_characters(value: str, is_secret: bool):
    assert is_random(value, is_password=True) is is_secret


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("password", "password"),
        ("DB_PASSWORD", "password"),
        ("passwd", "password"),
        ("PASSWD", "password"),
        ("PWD", "password"),
        ("passphrase", "password"),
        ("PASSPHRASE", "password"),
        ("client_secret", "assigned-secret"),
        ("API_KEY", "assigned-secret"),
    ],
)
def test_what_has_the_name_of_a_password_is_one(name: str, kind: str):
    assert set(found(f"{name}={VALUE}")) == {(VALUE, kind)}
    is_password = kind == "password"
    assert found(f"{name}='{PASSWORD}'") == [(PASSWORD, kind)] * is_password


@pytest.mark.parametrize(
    ("text", "secrets"),
    [
        (f"api_token={VALUE}", [VALUE]),
        (f"api_token = {VALUE} token: {VALUE}2", [VALUE, f"{VALUE}2"]),
        (f"/v1?api_token={VALUE}&page=2&size=3", [VALUE]),
        (f"api_token={VALUE}&and", [f"{VALUE}&and"]),
        (f"call(api_token={VALUE}),", [VALUE]),
        (f"[api_token: {VALUE}]; x", [VALUE]),
        (f"api_token='{VALUE},;)'", [f"{VALUE},;)"]),
        (f"next_token={VALUE} pageToken: {VALUE}", []),
        (f"client_request_token={VALUE} continuation-token={VALUE}", []),
        (f"{'x ' * 40}next_token={VALUE}", []),
        (f"next_page {'x ' * 12} token={VALUE}", [VALUE]),
        (f"next_token of api_token={VALUE}", [VALUE]),
        # What is code and not a value, unless it is quoted.
        (f"api_token=@{VALUE}", []),
        (f"api_token='@{VALUE}'", [f"@{VALUE}"]),
        (f"password=@!#{PASSWORD}", []),
        (f"password=@!#~{PASSWORD}", [f"@!#~{PASSWORD}"]),
        (f"api_token=get({VALUE}", []),
        (f"api_token=get[{VALUE}", []),
        (f"api_token=https://{VALUE}", []),
        (f"api_token=qUxv.Kpwz-{VALUE}", [f"qUxv.Kpwz-{VALUE}"]),
        ("api_token=shop.settings-controller-handler-v2", []),
        ("api_token=shop.dev-" + "q7uxv29kpw41lmzt8rb3", ["shop.dev-q7uxv29kpw41lmzt8rb3"]),
    ],
)
def test_a_value_ends_where_the_text_goes_on(text: str, secrets: list[str]):
    assert found(text) == [
        (secret, "password" if "password" in text else "assigned-secret") for secret in secrets
    ]


def twice(encode, text: str) -> str:
    return encode(encode(text))


def in_base64(text: str) -> str:
    return base64.b64encode(f"<< {text} >>".encode()).decode()


def in_percent(text: str) -> str:
    return quote(f"={text}=", safe="")


@pytest.mark.parametrize("encode", [in_base64, in_percent])
def test_a_secret_is_found_in_two_encodings_and_not_in_three(encode):
    text = f"api_token: {VALUE} there"
    once, two = encode(text), twice(encode, text)
    assert found(f"! {once} !", signals={"base64", "percent"})[0][1] == "assigned-secret"
    assert found(f"! {two} !", signals={"base64", "percent"})[0][1] == "assigned-secret"
    assert found(f"! {encode(two)} !", signals={"base64", "percent"}) == []


def test_base64_of_an_address_is_read_in_both_alphabets():
    text = f'{{"a": "~~~???>>>", "api_token": "{VALUE}"}}'
    normal = base64.b64encode(text.encode()).decode()
    for_urls = base64.urlsafe_b64encode(text.encode()).decode()
    assert {"+", "/"} & set(normal)
    assert {"-", "_"} & set(for_urls)
    for value in (normal, for_urls):
        assert found(value, signals={"base64"}) == [(value, "assigned-secret")]


def test_base64_that_holds_no_text_is_left_alone():
    text = f"api_token={VALUE} ".encode()
    for data in (text + b"\x00", text + b"\x7f", b"\x01" + text):
        value = base64.b64encode(data).decode()
        assert found(value, signals={"base64"}) == []
    for data in (text + b"\t", text + b"\n", text + b"\r", text + b"~"):
        value = base64.b64encode(data).decode()
        assert found(value, signals={"base64"}) == [(value, "assigned-secret")]


def test_a_value_in_an_address_goes_with_the_word_it_stands_in():
    value = f"api_token%3D{VALUE}"
    assert found(f"?q={value}&b=1", signals={"percent"}) == [(value, "assigned-secret")]
    head = "a" * 250
    # 200 characters before the first escape are read, and go with the value.
    assert found(f"{head}_token%3D{VALUE}", signals={"percent"}) == [
        (f"{'a' * 194}_token%3D{VALUE}", "assigned-secret")
    ]


@pytest.mark.parametrize(
    ("before", "is_found"),
    [("", 1), (" ", 1), ("=", 1), ("_", 1), ("é ", 1), (r"\n", 1), ("%3D", 1), ("a%20", 1)]
    + [("x", 0), ("7", 0), ("%D", 0), ("%33D", 0), (r"\nn", 0), ("an", 0)],
)
def test_a_token_begins_a_word_or_follows_an_escape(before: str, is_found: int):
    text = f"{before}{GITHUB} it is"
    assert found(text, signals={"token"}) == [(GITHUB, "github-token")] * is_found


@pytest.mark.parametrize(
    ("text", "hits"),
    [
        ("a sk_live_" + "a1B2" * 6, [("sk_live_" + "a1B2" * 6, "stripe-key")]),
        ("rk_live_" + "a1B2" * 6, [("rk_live_" + "a1B2" * 6, "stripe-key")]),
        ("ask_live_" + "a1B2" * 6, []),
        ("k_live_" + "a1B2" * 6, []),
        (
            f"bot1234567890:AA{'a1B2c3' * 5}xyz",
            [(f"1234567890:AA{'a1B2c3' * 5}xyz", "telegram-token")],
        ),
        (
            f"{'w' * 40} 12345678:AA{'a1B2c3' * 5}xyz",
            [(f"12345678:AA{'a1B2c3' * 5}xyz", "telegram-token")],
        ),
        (f"1234567:AA{'a1B2c3' * 5}xyz", []),
        ("npm_" + "a1B2c3" * 6, [("npm_" + "a1B2c3" * 6, "npm-token")]),
        ("npm_" + "controllerHandlerSettingsContentSer2", []),
        (GITHUB + GITHUB, [(GITHUB + GITHUB[:3], "github-token")]),
    ],
)
def test_a_token_is_known_by_what_stands_before_and_behind(text: str, hits: list[tuple[str, str]]):
    assert found(text, signals={"token"}) == hits


@pytest.mark.parametrize(
    ("text", "hits"),
    [
        (f"http://kim:{PASSWORD}@db.shop.dev", [(PASSWORD, "url-password")]),
        ("http://kim:wHaT@db and http://kim:7294@db", [("wHaT", "url-password")]),
        ("http://kim:Postgres@db http://kim:dummy-x@db http://kim:abc@db", []),
        (f"Authorization: Bearer {VALUE}", [(VALUE, "bearer-token")]),
        ("Authorization: Bearer token-of-the-shop-service", []),
        (
            "Authorization: Basic a2ltOmhIN2dnMmtMbVE5eA==",
            [("a2ltOmhIN2dnMmtMbVE5eA==", "basic-auth")],
        ),
        ("Authorization: Basic a2ltOmhIN2dnMmtMbVE5eA", [("a2ltOmhIN2dnMmtMbVE5eA", "basic-auth")]),
        ("Authorization: Basic a2ltaEg3Z2cya0xtUTl4", []),  # without a colon
        ("the Basic Authentication of the shop", []),
        (f"curl -u kim:{PASSWORD} http://db", [(PASSWORD, "password")]),
        ("curl -u kim:hunting http://db", []),
        (f"mysql --password '{PASSWORD}'", [(PASSWORD, "password")]),
    ],
)
def test_a_secret_is_known_by_the_line_it_stands_in(text: str, hits: list[tuple[str, str]]):
    assert found(text, signals={"line"}) == hits
