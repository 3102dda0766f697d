"""Secrets in the forms that other scanners publish, in the texts that coding sessions are made of."""

import json
import re
import string
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from replay_pipeline.redaction.redactor import Redactor

FORMS: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("secret_forms.toml").read_text("utf-8")
)
_ALNUM = string.ascii_letters + string.digits
_SETS = {
    "d": string.digits,
    "x": "0123456789abcdef",
    "X": "0123456789ABCDEF",
    "l": string.ascii_lowercase + string.digits,
    "u": string.ascii_uppercase + string.digits,
    "a": string.ascii_letters,
    "w": _ALNUM,
    "s": _ALNUM + "-_",
    "b": _ALNUM + "+/",
}


def drawn(form: str, random: Random) -> str:
    """A value of this form; the ends are no signs, which no tool prints with a secret."""

    def characters(match: re.Match[str]) -> str:
        n, letters = int(match[1]), _SETS[match[2]]
        ends = [c for c in letters if c.isalnum()]
        inner = "".join(random.choice(letters) for _ in range(n - 2))
        return (random.choice(ends) + inner + random.choice(ends))[:n]

    return re.sub(r"\{(\d+):(\w)\}", characters, form)


ANYWHERE: dict[str, Callable[[str, str], str]] = {
    "prose": lambda n, s: f"I tried it with {s} and it worked.\n",
    "log line": lambda n, s: f"2026-03-01T10:00:00Z INFO client started key={s} retries=3\n",
    "numbered": lambda n, s: f"     1\u2192import app\n     2\u2192app.connect('{s}')\n",
    "diff": lambda n, s: f"@@ -1 +1 @@\n-connect(old)\n+connect('{s}')\n",
    "query": lambda n, s: f"GET https://api.shop.dev/v1/items?key={s}&page=2 200\n",
    "shell": lambda n, s: f"$ shopctl login --key {s} --region eu\nok\n",
}
"""Around a secret that is known by its look: by name of its carrier."""
NAMED: dict[str, Callable[[str, str], str]] = {
    "env": lambda n, s: f"export {n}={s}\nmake run\n",
    "env file": lambda n, s: f'DEBUG=1\n{n}="{s}"\n',
    "yaml": lambda n, s: f"services:\n  app:\n    environment:\n      {n}: {s}\n",
    "json": lambda n, s: json.dumps({"name": "app", n.lower(): s}, indent=2),
    "json in json": lambda n, s: json.dumps({"body": json.dumps({n.lower(): s})}),
    "python": lambda n, s: f"{n} = '{s}'\nclient = Client({n})\n",
    "typescript": lambda n, s: f"const {_camel(n)} = `{s}`;\n",
    "toml": lambda n, s: f'[app]\n{n.lower()} = "{s}"\n',
    "table": lambda n, s: f"| name | value |\n|---|---|\n| {n} | {s} |\n",
    "html": lambda n, s: f'<input type="hidden" name="{n.lower()}" value="{s}">\n',
    "xml": lambda n, s: f"<config>\n  <{n.lower()}>{s}</{n.lower()}>\n</config>\n",
    "header": lambda n, s: f"curl -H 'X-{n.title().replace('_', '-')}: {s}' https://api.shop.dev\n",
    "docker": lambda n, s: f"docker run --rm -e {n}={s} -p 80:80 shop:latest\n",
    "arguments": lambda n, s: f'os.environ.setdefault("{n}", "{s}")\n',
    "flag": lambda n, s: f"shopctl login --{n.lower().replace('_', '-')}={s}\n",
}
"""Around a secret that is known by the name it is given to, or by its look."""


def _camel(name: str) -> str:
    first, *others = name.lower().split("_")
    return first + "".join(part.title() for part in others)


def planted(seed: int, n: int = 1500) -> Iterator[tuple[str, str, str, str]]:
    """Kind, carrier, secret and text: every kind in one carrier after the other."""
    random = Random(seed)
    kinds = [(kind, form, NAMED) for kind, form in FORMS["by_name"].items()]
    kinds += [(kind, form, NAMED | ANYWHERE) for kind, form in FORMS["by_look"].items()]
    for number in range(n):
        kind, form, carriers = kinds[number % len(kinds)]
        carrier = random.choice(sorted(carriers))
        secret = drawn(form, random)
        name = kind.upper().replace("-", "_")
        yield kind, carrier, secret, carriers[carrier](name, secret)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_of_1500_secrets_in_published_forms_99_percent_go(seed: int):
    texts = list(planted(seed))
    assert len({kind for kind, *_ in texts}) >= 90
    assert len({carrier for _, carrier, *_ in texts}) >= 12
    redactor = Redactor()
    redactor.prepare(text for *_, text in texts)
    left = [
        f"{kind} in {carrier}: {text}"
        for kind, carrier, secret, text in texts
        if secret[len(secret) // 3 : -len(secret) // 4] in redactor.text(text)
    ]
    assert len(left) <= 0.01 * len(texts), "\n".join(left)
