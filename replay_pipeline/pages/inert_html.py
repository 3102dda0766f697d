"""Write a self-contained HTML page in which text of sessions can't execute anything."""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

MARK = '<meta name="generator" content="replay-pipeline">'
"""A mark in the head of each page, which tells our pages from other files."""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{mark}
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
{data}
{scripts}
</body>
</html>
"""


def html_page(
    *, title: str, style: str, body: str, scripts: Sequence[str], data: Sequence[tuple[str, str]]
) -> str:
    """Return a page whose security policy allows only its own style and scripts.

    Args:
        title: title of the page.
        style: its style sheet. The shared colors come before it.
        body: HTML of its body, written by this package. It isn't escaped.
        scripts: its scripts, in order.
        data: JSON for the scripts by name, made by `inert`.
    """
    style = Path(__file__).with_name("palette.css").read_text("utf-8") + style
    policy = "; ".join(
        (
            "default-src 'none'",
            f"style-src {_source(style)}",
            # Trust goes from these scripts to those that they add: the page's own data files.
            f"script-src {' '.join(map(_source, scripts))} 'strict-dynamic'",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    return _PAGE.format(
        mark=MARK,
        title=title,
        policy=policy,
        style=style,
        body=body,
        data="\n".join(
            f'<script type="application/json" data-name="{name}">{text}</script>'
            for name, text in data
        ),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


def _source(text: str) -> str:
    """Return a content security policy source that allows exactly this inline text."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def inert(json_text: str) -> str:
    """Return JSON that cannot end its script element or start another one."""
    return json_text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
