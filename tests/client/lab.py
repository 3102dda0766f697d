"""Conversations with real clients, each had once and kept: the home with its logs, and what was sent."""

import json
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from replay_pipeline.ingesters import IngestReport
from replay_pipeline.ingesters.harness.harness import HarnessStore
from replay_pipeline.ingesters.harness.record import record
from tests.client.clients import FIRST_WITH_REQUESTS, Desk, client, numbers_of
from tests.client.comparison import Compared, compared
from tests.client.conversations import CONVERSATIONS
from tests.client.scripted_model import Body


class Lab:
    """Conversations of versions of Claude Code below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def had(self, version: str, name: str) -> tuple[Path, list[tuple[str, Body]], str]:
        """Have a conversation, unless it is kept here; returns logs, requests and what the client printed."""
        place = self.folder / version / name
        kept = place / "requests.json"
        if not kept.exists():
            rmtree(place, ignore_errors=True)
            desk = Desk(place)
            model = CONVERSATIONS[name](desk, client(version))
            model.close()
            (place / "said.txt").write_text(desk.said)
            kept.write_text(json.dumps(model.requests))
        requests = [(message_id, body) for message_id, body in json.loads(kept.read_text())]
        logs = place / "home" / ".claude" / "projects"
        return logs, requests, (place / "said.txt").read_text()

    def _harnesses(self, version: str) -> HarnessStore:
        """Return the store with what a version sends around a conversation, in both of its starts."""
        store = HarnessStore(self.folder)
        if numbers_of(version) < FIRST_WITH_REQUESTS and version not in {h.version for h in store}:
            for said in (("-p", "hi"), ("hi",)):
                store.keep(record([*client(version), *said]))
        return store

    def compared(self, version: str, name: str) -> tuple[list[Compared], IngestReport]:
        """Return each decision of a conversation beside its request, and the report of the reader."""
        logs, requests, said = self.had(version, name)
        found = compared(logs, requests, self._harnesses(version))
        assert found[0], said
        return found


@cache
def lab() -> Lab:
    """Return the lab of this process, in a folder of its own."""
    return Lab(Path(mkdtemp()))
