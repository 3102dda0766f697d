"""Secrets in the forms that text of coding sessions has: the kinds are those of public scanners."""

import pytest

from replay_pipeline.redaction.redactor import Redactor, find_secrets


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
