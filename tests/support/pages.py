"""What is in a page of `look`, read without a browser."""

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

_FILE = re.compile(r"lookData\('([a-z0-9-]+)',(.*)\);\n", re.DOTALL)


def data_of(folder: Path) -> dict[str, Any]:
    """Return everything that a page in a folder loads, by its name."""
    found = {}
    for path in sorted((folder / "data").glob("*.js")):
        match = _FILE.fullmatch(path.read_text("utf-8"))
        assert match is not None, path
        assert match[1] == path.stem
        found[match[1]] = unpacked(json.loads(match[2]))
    return found


def unpacked(value: Any) -> Any:
    """Return what was compressed."""
    if isinstance(value, str):
        return json.loads(gzip.decompress(base64.b64decode(value)))
    return value


def turns_of(data: dict[str, Any], number: int = 0) -> list[dict[str, Any]]:
    """Return the turns of a session in what `data_of` gives."""
    return data[f"session-{number}"]
