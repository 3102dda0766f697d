"""Small recordings for `make test`: logs of real clients, and what they sent.

    python -m tests.client.recordings tests/data/clients

Folders of this machine get other names, and the client's own long texts are cut: in what was sent, in the
log, and so in the hashes by which the log names it. They are worked out here again, from what was sent.
"""

import gzip
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from platform import release
from tempfile import TemporaryDirectory
from typing import Any

from tests.client.clients import Desk, client
from tests.client.conversations import CONVERSATIONS
from tests.client.scripted_model import Body

RECORDED = {"2.1.310": ("tools", "project"), "2.1.330": ("tools", "compact", "queued", "fork")}
_LONGEST = 160
_UNHASHED = ("cache_control", "caller")


def hash_of(value: Any) -> str:
    """Return the hash of a value as the client's log names it."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def canonical(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as it is hashed: blocks, without marks of the cache."""
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    kept = [{k: v for k, v in block.items() if k not in _UNHASHED} for block in blocks]
    return message | {"content": kept}


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """Return a value of JSON with other names in all of its texts, and long ones cut short."""
    if isinstance(value, str):
        for name, other in names.items():
            value = value.replace(name, other)
        return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}…"
    if isinstance(value, list):
        return [renamed(item, names) for item in value]
    if isinstance(value, dict):
        return {key: renamed(item, names) for key, item in value.items()}
    return value


class Recording:
    """The log of one conversation and what was sent in it, with other names for this machine's folders."""

    def __init__(self, desk: Desk, requests: Sequence[tuple[str, Body]]) -> None:
        self._names = {
            str(desk.project): "/home/kim/tide",
            str(desk.project).replace("/", "-").replace(".", "-"): "-home-kim-tide",
            str(desk.home): "/home/kim",
            release(): "6.1",
        }
        self._shapes: dict[str, str] = {}
        hashes: dict[str, str] = {}
        self.sent = []
        for message_id, body in requests:
            messages = []
            for message in map(canonical, body["messages"]):
                messages.append(renamed(message, self._names))
                hashes[hash_of(message)] = hash_of(messages[-1])
            self.sent.append({"id": message_id, "messages": messages, **self._shape(body)})
        self.logs = {
            path.name: [self._row(json.loads(line), hashes) for line in path.open()]
            for path in sorted(desk.logs.rglob("*.jsonl"))
        }

    def write(self, path: Path) -> None:
        """Write the recording, the same bytes for the same recording."""
        data = json.dumps({"logs": self.logs, "sent": self.sent}, ensure_ascii=False).encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(data, mtime=0))

    def _shape(self, body: Body) -> dict[str, Any]:
        texts = [block["text"] for block in body.get("system") or ()]
        tools = [
            {key: value for key, value in tool.items() if key not in _UNHASHED}
            for tool in body.get("tools") or ()
        ]
        return {
            "system": [
                renamed(text, self._names) for text in texts if not text.startswith("x-anthropic")
            ],
            "tools": renamed(tools, self._names),
        }

    def _row(self, row: dict[str, Any], hashes: dict[str, str]) -> dict[str, Any]:
        row = renamed(row, self._names)
        row.pop("toolUseResult", None)
        if row["type"] == "api-request":
            row["tail"] = [hashes[name] for name in row["tail"]]
            row["shapeHash"] = self._shapes.get(row["shapeHash"], row["shapeHash"])
        elif row["type"] == "api-request-blob":
            row["hash"] = hashes[row["hash"]]
        elif row["type"] == "api-request-shape":
            name = hash_of(row["shape"])
            self._shapes[row["shapeHash"]] = row["shapeHash"] = name
        return row


def main() -> None:
    """Have the conversations, and write a recording of each."""
    folder = Path(sys.argv[1])
    for version, names in RECORDED.items():
        for name in names:
            with TemporaryDirectory() as place:
                desk = Desk(Path(place))
                model = CONVERSATIONS[name](desk, client(version))
                model.close()
                Recording(desk, model.requests).write(folder / f"{version}-{name}.json.gz")


if __name__ == "__main__":
    main()
