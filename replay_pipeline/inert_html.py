"""One HTML file that needs nothing else, and in which no text of a session can do anything."""

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def html_page(*, title: str, style: str, body: str, script: str, data: str) -> str:
    """Write a page whose policy allows its own style and script, and no other source at all.

    Args:
        title: title of the page.
        style: its style sheet; the colours that all pages share come before it.
        body: HTML of its body, written by this package: nothing in it is escaped.
        script: its script.
        data: JSON for the script, as `inert_json` writes it.
    """
    style = Path(__file__).with_name("palette.css").read_text("utf-8") + style
    policy = "; ".join(
        (
            "default-src 'none'",
            f"style-src {_source(style)}",
            f"script-src {_source(script)}",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    return _PAGE.format(
        title=title, policy=policy, style=style, body=body, data=data, script=script
    )


def address_of(page: Path, *, seen_from: Path) -> str:
    """Give the address of one page as a link of another has it, wherever both are moved together."""
    return quote(os.path.relpath(page.absolute(), seen_from.absolute().parent).replace(os.sep, "/"))


def _source(text: str) -> str:
    """Give a content security policy source that allows exactly this inline text."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def inert_json(data: Mapping[str, Any]) -> str:
    """Write JSON that cannot end its script element or start another one."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
