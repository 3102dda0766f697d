"""Secrets in the forms that text of coding sessions has: the kinds are those of public scanners."""

from collections.abc import Callable
from random import Random
from string import ascii_letters, digits

import pytest

from replay_pipeline.redaction.redactor import Redactor, find_secrets


def drawn(random: Random, letters: str, n: int) -> str:
    """A value as it is drawn at random, which is never without a digit."""
    value = "".join(random.choice(letters) for _ in range(n - 2))
    return value[: n // 2] + random.choice(digits) + value[n // 2 :] + random.choice(digits)


def token(random: Random, n: int) -> str:
    return drawn(random, ascii_letters + digits, n)


KINDS: dict[str, Callable[[Random], str]] = {
    "alibaba-access-key-id": lambda r: "LTAI" + token(r, 20),
    "discord-webhook": lambda r: (
        f"https://discord.com/api/webhooks/{10**17 + r.randrange(10**17)}/{token(r, 68)}"
    ),
    "fireworks-key": lambda r: "fw_" + token(r, 24),
    "fly-token": lambda r: "fm2_" + token(r, 60),
    "mailgun-key": lambda r: "pubkey-" + drawn(r, "abcdef" + digits, 32),
    "new-relic-key": lambda r: "NRII-" + token(r, 27),
    "planetscale-token": lambda r: "pscale_tkn_" + token(r, 43),
    "square-token": lambda r: "EAAA" + token(r, 40),
    "typeform-token": lambda r: "tfp_" + token(r, 59),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_found_by_its_own_look(kind: str):
    random = Random(kind)
    for _ in range(20):
        value = KINDS[kind](random)
        assert value[-20:] not in Redactor().text(f"it says {value} there")


@pytest.mark.parametrize("slash", ["/", r"\/", r"\\/"])
def test_a_password_in_an_address_is_found_behind_escaped_slashes(slash: str):
    text = f"postgres:{slash}{slash}svc:hH7gg2kLmQ9x@db.shop.dev:5432{slash}x"
    assert "hH7gg2kLmQ9x" not in Redactor().text(text)


@pytest.mark.parametrize(
    "text",
    [
        "token = self._get_next_token2(stream)",
        "api_key=settings.openai.api_key_v2",
        "access_token: Optional[AccessTokenV2] = None",
        '"NextToken": "eav1OzQB0OM8rLdGXOEsyQWSGXXqnqL3"',
        "password=request.form.get('password1')",
        "| access_token | the OAuth2 token of the current user |",
        "<api_key>YOUR_API_KEY_GOES_HERE_1</api_key>",
        "client_secret = load_client_secret_from_vault_v2()",
        'data-token-type="bearerTokenHandlerFactory2"',
        "postgresql://scott:tiger@localhost/test",
    ],
)
def test_code_that_speaks_of_secrets_holds_none(text: str):
    assert find_secrets(text) == []


_WEBHOOK = "hooks.slack.com/services/T02AB3CD4/B05EF6GH7/" + "aZ9xY8wV7uT6" + "sR5qP4oN3mL2"


@pytest.mark.parametrize(
    "text",
    [
        '{{"url":"https://{}"}}'.format(_WEBHOOK.replace("/", r"\/")),
        r'{{"text":"{{\"url\":\"https:\/\/{}\"}}"}}'.format(_WEBHOOK.replace("/", r"\/")),
        f"<p>https://{_WEBHOOK}</p>",
        "<p>https:&#x2F;&#x2F;{}</p>".format(_WEBHOOK.replace("/", "&#x2F;")),
        "https:{}".format(f"//{_WEBHOOK}".replace("/", r"\u002F")),
        "<td>https://acme.webhook.office.com/webhookb2/%s</td>" % ("8a1b2c3d-1111@" * 6),
        "curl -u kim:x9^Lq2Zz8 https://shop.dev",
        r"curl -u \"kim:x9^Lq2Zz8\" https://shop.dev",
    ],
)
def test_a_secret_is_found_however_its_signs_are_written(text: str):
    redacted = Redactor().text(text)
    assert "<SECRET:" in redacted
    for secret in ("mL2", "8a1b2c3d-1111@8a1b2c3d", "x9^", "Zz8"):
        assert secret not in redacted
