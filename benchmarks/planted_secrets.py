"""Made-up secrets of many kinds, planted in the texts that a coding session is made of.

Every value is drawn from a seeded generator: none opens anything.
"""

import base64
import json
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from urllib.parse import quote

ALNUM = string.ascii_letters + string.digits
HEX = "0123456789abcdef"
URLSAFE = ALNUM + "-_"
UPPER = string.ascii_uppercase + string.digits


@dataclass(frozen=True)
class Planted:
    """A secret, and a text that holds it in some form."""

    kind: str
    context: str
    text: str
    forms: tuple[str, ...]
    """What must not survive: the secret as it stands in the text, and its telling part."""


class _Draw:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def __call__(self, n: int, alphabet: str = ALNUM) -> str:
        return "".join(self.random.choice(alphabet) for _ in range(n))

    def password(self) -> str:
        """Twelve to sixteen characters, with a capital, a digit and a sign."""
        body = list(self(self.random.randint(9, 13)) + self(1, string.ascii_uppercase))
        body += [self(1, string.digits), self.random.choice("!#$*_-+")]
        head = body.pop(0)
        self.random.shuffle(body)
        return head + "".join(body)


def _pem(label: str, n_lines: int = 12) -> Callable[[_Draw], str]:
    def make(draw: _Draw) -> str:
        lines = [draw(64, ALNUM + "+/") for _ in range(n_lines)] + [draw(38, ALNUM + "+/") + "=="]
        return "\n".join([f"-----BEGIN {label}-----", *lines, f"-----END {label}-----"])

    return make


def _jwt(draw: _Draw) -> str:
    def part(value: dict[str, object]) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    head = part({"alg": "HS256", "typ": "JWT"})
    return f"{head}.{part({'sub': draw(12), 'iat': 1700000000})}.{draw(43, URLSAFE)}"


TOKENS: dict[str, Callable[[_Draw], str]] = {
    "github-pat": lambda d: "ghp_" + d(36),
    "github-oauth": lambda d: "gho_" + d(36),
    "github-app": lambda d: "ghs_" + d(36),
    "github-fine-grained": lambda d: "github_pat_" + d(22) + "_" + d(59),
    "gitlab-pat": lambda d: "glpat-" + d(20, URLSAFE),
    "slack-bot": lambda d: f"xoxb-{d(12, '123456789')}-{d(13, '123456789')}-{d(24)}",
    "slack-webhook": lambda d: (
        f"https://hooks.slack.com/services/T{d(10, UPPER)}/B{d(10, UPPER)}/{d(24)}"
    ),
    "aws-access-key": lambda d: "AKIA" + d(16, string.ascii_uppercase + "234567"),
    "gcp-api-key": lambda d: "AIza" + d(35, URLSAFE),
    "openai-legacy": lambda d: "sk-" + d(20) + "T3BlbkFJ" + d(20),
    "openai-project": lambda d: "sk-proj-" + d(74, URLSAFE) + "T3BlbkFJ" + d(74, URLSAFE),
    "anthropic": lambda d: "sk-ant-api03-" + d(93, URLSAFE) + "AA",
    "openrouter": lambda d: "sk-or-v1-" + d(64, HEX),
    "deepseek": lambda d: "sk-" + d(32, HEX),
    "huggingface": lambda d: "hf_" + d(34, string.ascii_letters),
    "replicate": lambda d: "r8_" + d(37),
    "groq": lambda d: "gsk_" + d(52),
    "xai": lambda d: "xai-" + d(80),
    "perplexity": lambda d: "pplx-" + d(48),
    "stripe-secret": lambda d: "sk_live_" + d(24),
    "stripe-restricted": lambda d: "rk_live_" + d(24),
    "sendgrid": lambda d: f"SG.{d(22, URLSAFE)}.{d(43, URLSAFE)}",
    "mailgun": lambda d: "key-" + d(32, HEX),
    "twilio-key": lambda d: "SK" + d(32, HEX),
    "npm": lambda d: "npm_" + d(36),
    "pypi": lambda d: "pypi-AgEIcHlwaS5vcmc" + d(70, URLSAFE),
    "docker-hub": lambda d: "dckr_pat_" + d(27, URLSAFE),
    "digitalocean": lambda d: "dop_v1_" + d(64, HEX),
    "telegram-bot": lambda d: f"{d(10, '123456789')}:AA{d(33, URLSAFE)}",
    "shopify": lambda d: "shpat_" + d(32, HEX),
    "linear": lambda d: "lin_api_" + d(40),
    "notion": lambda d: "ntn_" + d(46),
    "figma": lambda d: "figd_" + d(40, URLSAFE),
    "postman": lambda d: f"PMAK-{d(24, HEX)}-{d(34, HEX)}",
    "databricks": lambda d: "dapi" + d(32, HEX),
    "vault": lambda d: "hvs." + d(95, URLSAFE),
    "terraform-cloud": lambda d: f"{d(14)}.atlasv1.{d(67, URLSAFE)}",
    "grafana": lambda d: f"glsa_{d(32)}_{d(8, HEX)}",
    "new-relic": lambda d: "NRAK-" + d(27, UPPER),
    "supabase": lambda d: "sbp_" + d(40, HEX),
    "google-client-secret": lambda d: "GOCSPX-" + d(28, URLSAFE),
    "google-access-token": lambda d: "ya29." + d(120, URLSAFE),
    "doppler": lambda d: "dp.pt." + d(43),
    "atlassian": lambda d: "ATATT3xFfGF0" + d(170, URLSAFE) + "=" + d(8, "0123456789ABCDEF"),
    "pinecone": lambda d: f"pcsk_{d(6)}_{d(63)}",
    "langsmith": lambda d: f"lsv2_pt_{d(32, HEX)}_{d(10, HEX)}",
    "modal-id": lambda d: "ak-" + d(22),
    "modal-secret": lambda d: "as-" + d(22),
    "netlify": lambda d: "nfp_" + d(36),
    "jwt": _jwt,
    "age-key": lambda d: "AGE-SECRET-KEY-1" + d(58, "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L"),
}
"""Secrets that are known by their own look, wherever they stand."""

KEYS: dict[str, Callable[[_Draw], str]] = {
    "rsa-key": _pem("RSA PRIVATE KEY"),
    "ec-key": _pem("EC PRIVATE KEY", 2),
    "pkcs8-key": _pem("PRIVATE KEY"),
    "openssh-key": _pem("OPENSSH PRIVATE KEY", 8),
    "pgp-key": _pem("PGP PRIVATE KEY BLOCK", 20),
}
"""Secrets of several lines."""

ASSIGNED: dict[str, Callable[[_Draw], tuple[str, str]]] = {
    "aws-secret-key": lambda d: ("AWS_SECRET_ACCESS_KEY", d(40, ALNUM + "+/")),
    "datadog": lambda d: ("DATADOG_API_KEY", d(32, HEX)),
    "wandb": lambda d: ("WANDB_API_KEY", d(40, HEX)),
    "cloudflare": lambda d: ("CLOUDFLARE_API_TOKEN", d(40, URLSAFE)),
    "password": lambda d: ("DB_PASSWORD", d.password()),
    "django": lambda d: ("SECRET_KEY", d(50, ALNUM + "!@#$%^&*(-_=+)")),
    "session-secret": lambda d: ("SESSION_SECRET", d(32, HEX)),
    "azure-storage": lambda d: ("AccountKey", d(86, ALNUM + "+/") + "=="),
    "auth-token": lambda d: ("MY_SERVICE_AUTH_TOKEN", d(32)),
    "client-secret": lambda d: ("OAUTH_CLIENT_SECRET", d(36)),
}
"""Secrets that are known by the name they are given to."""

LINES: dict[str, Callable[[_Draw], tuple[str, str]]] = {
    "postgres-url": lambda d: _url(d, "postgresql://app:{}@db.internal:5432/shop"),
    "mysql-url": lambda d: _url(d, "mysql+pymysql://root:{}@10.0.0.7/shop"),
    "mongodb-url": lambda d: _url(d, "mongodb+srv://svc:{}@cluster0.ab1cd.mongodb.net/x"),
    "redis-url": lambda d: _url(d, "redis://:{}@cache:6379/0"),
    "amqp-url": lambda d: _url(d, "amqp://worker:{}@mq:5672/"),
    "https-url": lambda d: _url(d, "https://deploy:{}@git.shop.dev/core.git"),
    "bearer": lambda d: _filled(d(40), "curl -H 'Authorization: Bearer {}' https://api.shop.dev"),
    "basic": lambda d: _filled(
        base64.b64encode(f"svc:{d.password()}".encode()).decode(), "Authorization: Basic {}"
    ),
    "curl-user": lambda d: _filled(d.password(), "curl -u admin:{} https://api.shop.dev/v1"),
    "npmrc": lambda d: _filled(d(36), "//registry.shop.dev/:_authToken={}"),
    "netrc": lambda d: _filled(d.password(), "machine api.shop.dev login svc password {}"),
    "x-api-key": lambda d: _filled(d(40), "curl -H 'x-api-key: {}' https://api.shop.dev"),
    "sshpass": lambda d: _filled(d.password(), "sshpass -p '{}' ssh svc@host7"),
    "mysql-flag": lambda d: _filled(d.password(), "mysql -u root --password={} shop"),
    "pgpassword": lambda d: _filled(d.password(), "PGPASSWORD='{}' psql -h db shop"),
}
"""Secrets that are known by the line they stand in."""


def _filled(secret: str, line: str) -> tuple[str, str]:
    return secret, line.format(secret)


def _url(draw: _Draw, line: str) -> tuple[str, str]:
    secret = draw.password().replace("#", "-")
    return secret, line.format(secret)


def kinds() -> list[str]:
    """The kinds of secrets that are planted."""
    return sorted({*TOKENS, *KEYS, *ASSIGNED, *LINES})


def planted(seed: int = 0) -> Iterator[Planted]:
    """Each kind in every context that is natural for it."""
    draw = _Draw(seed)
    for kind, make in TOKENS.items():
        for context, wrap in _TOKEN_CONTEXTS.items():
            secret = make(draw)
            text, form = wrap(secret)
            yield Planted(kind, context, text, (form, _core(form)))
    for kind, make in KEYS.items():
        for context, wrap in _KEY_CONTEXTS.items():
            secret = make(draw)
            text, _ = wrap(secret)
            lines = secret.splitlines()[1:-1]
            forms = tuple(line for line in lines if line in text) or (_core(text),)
            yield Planted(kind, context, text, forms)
    for kind, assign in ASSIGNED.items():
        for context, form in _ASSIGNMENTS.items():
            name, secret = assign(draw)
            value = json.dumps(secret)[1:-1] if "json" in context else secret
            yield Planted(kind, context, form.format(name=name, value=value), (value,))
    for kind, fill in LINES.items():
        for context, wrap in _LINE_CONTEXTS.items():
            secret, line = fill(draw)
            text, form = wrap(line, secret)
            yield Planted(kind, context, text, (form,))


def _core(form: str) -> str:
    """The middle of a secret: half a secret left over is a leak too."""
    return form[len(form) // 3 : -len(form) // 4]


_TOKEN_CONTEXTS: dict[str, Callable[[str], tuple[str, str]]] = {
    "prose": lambda s: (f"I used {s} for the call.\nIt worked.", s),
    "env": lambda s: (f"export SERVICE_CREDENTIAL={s}\nmake run", s),
    "json": lambda s: (json.dumps({"service": {"credential": s, "n": 1}}), s),
    "escaped json": lambda s: (json.dumps(json.dumps({"credential": s})), s),
    "code": lambda s: (f"client = Client(key='{s}', retries=3)\n", s),
    "url-encoded": lambda s: (
        f"GET /cb?state=1&value={quote(s, safe='')}&x=2",
        quote(s, safe=""),
    ),
    "base64": lambda s: _in_base64(s),
}

_KEY_CONTEXTS: dict[str, Callable[[str], tuple[str, str]]] = {
    "file": lambda s: (f"$ cat key\n{s}\n$ ", s),
    "numbered": lambda s: (
        "\n".join(f"{i:6}\u2192{line}" for i, line in enumerate(s.splitlines(), 1)),
        s,
    ),
    "json": lambda s: (json.dumps({"type": "service_account", "private_key": s}), s),
    "escaped json": lambda s: (json.dumps(json.dumps({"private_key": s})), s),
    "indented": lambda s: ("key: |\n" + "\n".join(f"    {x}" for x in s.splitlines()), s),
    "truncated": lambda s: (f"$ head key\n{s[: len(s) * 2 // 3]}", s),
}

_ASSIGNMENTS = {
    "env": "export {name}={value}\nmake run",
    "quoted env": '{name}="{value}"\n',
    "yaml": "env:\n  {name}: {value}\n",
    "json": '{{"{name}": "{value}", "n": 1}}',
    "python": "os.environ['{name}'] = '{value}'\n",
    "spaced": "{name} = {value}\n",
    "flag": "docker run -e {name}={value} image",
}

_LINE_CONTEXTS: dict[str, Callable[[str, str], tuple[str, str]]] = {
    "line": lambda line, s: (f"$ {line}\nok\n", s),
    "json": lambda line, s: (json.dumps({"command": line}), json.dumps(s)[1:-1]),
    "prose": lambda line, s: (f"Then I ran:\n\n    {line}\n\nand it answered 200.", s),
}


REPEATED: dict[str, Callable[[str], str]] = {
    "plain": lambda s: f"./login {s} now; the value is {s}, and nothing else",
    "in json": lambda s: json.dumps(json.dumps({"said": f"use {s}"})),
    "in an address": lambda s: f"GET /cb?state=1&v={quote(s, safe='')}&x=2",
    "in base64": lambda s: f"echo {base64.b64encode(f'it is {s}!'.encode()).decode()} | base64 -d",
    "alone in base64": lambda s: f"data:{base64.urlsafe_b64encode(s.encode()).decode()};",
}
"""Where a value stands again, and nothing beside it tells of a secret."""


def given_away(n: int, seed: int = 1) -> list[tuple[Planted, str]]:
    """Texts that give a value away, and the value, drawn from all kinds."""
    told = [each for number in range(9) for each in planted(number)]
    plain = {*TOKENS, *ASSIGNED, *LINES} - {"basic"}
    fit = [p for p in told if p.kind in plain and p.context in ("prose", "env", "line")]
    return [(each, each.forms[0]) for each in Random(seed).sample(fit, n)]


def _in_base64(secret: str) -> tuple[str, str]:
    text = base64.b64encode(f"credential={secret}\n".encode()).decode()
    return f"echo {text} | base64 -d", text
