"""What our own rules take for a secret, and where it begins and ends."""

import base64
import re
from urllib.parse import quote

import pytest

from replay_pipeline.redaction.secret_rules import (
    RULES,
    SIGNALS,
    SecretHit,
    TokenRule,
    _signals_of,
    entropy,
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
    ("value", "bits"),
    [("", 0), ("aaaa", 0), ("abab", 1), ("aabc", 1.5), ("abcd", 2), ("abcdefgh" * 3, 3)],
)
def test_entropy_is_in_bits_for_each_character(value: str, bits: float):
    assert entropy(value) == bits


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


def test_values_are_looked_for_only_where_a_name_was_seen():
    text = f"token={VALUE} token={VALUE}"
    second = text.rindex("token")
    assert set(own_hits(text, signals={"assigned"}, assigned=[(second, len(text))])) == {
        SecretHit(second + 6, len(text), "assigned-secret")
    }
    assert list(own_hits(text, signals={"assigned"}, assigned=[])) == []
    assert list(own_hits(text, signals={"assigned"}, assigned=[(8, 20)])) == []
    assert list(own_hits(text, signals={"assigned"}, assigned=[(1, second)])) == [
        SecretHit(6, 6 + len(VALUE), "assigned-secret")
    ]
    assert len(list(own_hits(text, signals={"assigned"}))) == 2


IN_BASE64 = base64.b64encode(b"it says api_token=q7Uxv29Kpw41LmZt8Rb3Yd1 there").decode()
KEY = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASC\n-----END PRIVATE KEY-----"
OF_FAMILY = {
    "token": (GITHUB, "github-token"),
    "assigned": (VALUE, "assigned-secret"),
    "line": (PASSWORD, "url-password"),
    "key": (KEY, "private-key"),
    "base64": (IN_BASE64, "assigned-secret"),
    "percent": (f"a%20token%3D{VALUE}2", "assigned-secret"),
}


def test_only_the_families_of_rules_that_may_hit_are_tried():
    text = "\n".join(
        [
            f"see {GITHUB}",
            f"my_secret: {VALUE}",
            f"http://kim:{PASSWORD}@db",
            KEY,
            IN_BASE64,
            f"?a%20token%3D{VALUE}2",
        ]
    )
    for family, hit in OF_FAMILY.items():
        assert found(text, signals={family}) == [hit], family
    assert found(text, signals=set()) == []
    assert set(found(text)) == set(OF_FAMILY.values())
    assert set(OF_FAMILY) < set(SIGNALS)


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


@pytest.mark.parametrize(("n_before", "start"), [(0, 0), (1, 1), (2, 5), (3, 5)])
def test_a_value_in_base64_goes_from_three_characters_before_its_ascii(n_before: int, start: int):
    # Three bytes are four characters: 0, 1, 2 and 2 groups of them hold two bytes of an é.
    data = "é" * n_before + f" api_token={VALUE} there"
    value = base64.b64encode(data.encode()).decode()
    assert found(f"data:{value};", signals={"base64"}) == [(value[start:], "assigned-secret")]


@pytest.mark.parametrize("n_behind", range(4))
@pytest.mark.parametrize("ending", ["", "="])
def test_a_value_in_base64_is_read_with_its_padding_and_without(n_behind: int, ending: str):
    value = base64.b64encode(f"api_token={VALUE}{'7' * n_behind}".encode()).decode()
    shown = value if ending else value.rstrip("=")
    assert found(f"of {shown} is", signals={"base64"}) == [(shown, "assigned-secret")]


def test_a_letter_behind_a_value_in_base64_hides_nothing():
    value = base64.b64encode(f"api_token={VALUE}78 is.".encode()).decode().rstrip("=")
    assert len(value) % 4 == 0
    assert found(f"{value}x", signals={"base64"}) == [(f"{value}x", "assigned-secret")]


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


@pytest.mark.parametrize(
    ("text", "family"),
    [
        (f"tail\n{IN_BASE64}", "base64"),
        (f"tail\n%20token%3D{VALUE}", "percent"),
        (f"1234567890\n:AA{'a1B2c3' * 5}xyz", "token"),
    ],
)
def test_the_line_before_a_secret_stays(text: str, family: str):
    _, second = text.split("\n")
    assert {secret for secret, _ in found(text, signals={family})} <= {second}


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


@pytest.mark.parametrize(
    ("literals", "body", "signal"),
    [
        (("ghp_",), r"[A-Za-z0-9]{36,255}", r"(?:ghp_)[A-Za-z0-9]{12}"),
        (("a.", "b+"), r"\w{13}", r"(?:a\.|b\+)\w{12}"),
        (("x",), r"\w{12}", r"(?:x)\w{12}"),
        (("x",), r"\w{4,}-\w{30}(?!\w)", r"(?:x)\w{4}"),
        (("x",), r"(?=[a-z]*\d)[a-z0-9]{20}(?![\w-])", r"(?:x)[a-z0-9]{12}"),
        (("x",), r"(?:a|b)_\w+(?!\w)", r"(?:x)(?:a|b)_\w+"),
    ],
)
def test_a_token_is_searched_for_by_its_first_characters(
    literals: tuple[str, ...], body: str, signal: str
):
    assert TokenRule(kind="a", literals=literals, body=body).signal == signal


@pytest.mark.parametrize(
    ("family", "text", "signs"),
    [
        ("token", f"see {GITHUB}", GITHUB[:16]),
        ("token", "see glpat-" + "a1B2c" * 4, "glpat-" + "a1B2ca1B2ca1"),
        ("assigned", "my api_token = 'abc7xyz'", "oken = 'abc7"),
        ("assigned", "SECRET_KEY_BASE:x1", "ECRET_KEY_BASE:x1"),
        ("assigned", r"{\"password\": \"a1\"}", r"assword\": \"a1"),
        ("assigned", "<td>api_key</td> <td>a1</td>", "pi_key</td> <td>a1"),
        ("assigned", '<input name="token" value="a1">', 'oken" value="a1'),
        ("assigned", "| `api_key` | `a1` |", "pi_key` | `a1"),
        ("assigned", "token => a1", "oken => a1"),
        ("assigned", "token = abc", None),
        ("assigned", "token abc1", None),
        ("line", "Bearerabcdefgh", None),
        ("line", "Bearer abcdefghij", "earer abcdefgh"),
        ("line", "http://kim:abc@db", "://kim:abc@"),
        ("key", "a PRIVATE KEY is", "PRIVATE KEY"),
        ("key", "a private key is", None),
        ("base64", IN_BASE64, IN_BASE64[:24]),
        ("base64", IN_BASE64[:23], None),
        ("percent", "50%4a and %4A", "%4a"),
        ("percent", "50%4x", None),
        ("cut", f"?a={VALUE}&b", f"={VALUE}&"),
        ("cut", f"<a>{VALUE}</a>", f">{VALUE}<"),
        ("cut", "?a=q7Uxv29Kpw41LmZ&b", None),
        ("cut", "?a=q7Uxv29Kpw41LmZt&b", "=q7Uxv29Kpw41LmZt&"),
    ],
)
def test_a_quick_search_sees_what_a_family_of_rules_may_find(
    family: str, text: str, signs: str | None
):
    match = re.search(_signals_of(RULES)[family], text)
    assert (match and match.group()) == signs
