"""Record and list the harnesses of a data root."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from replay_pipeline.ingesters.harness import Harness, HarnessStore

if TYPE_CHECKING:
    from replay_pipeline.stages.project import Project


def record_harness(
    project: "Project",
    command: Sequence[str],
    *,
    agent: str | None = None,
    version: str | None = None,
    timeout_s: float = 60.0,
) -> dict[str, Any]:
    """Record the harness of a client, store it in the data root, and return it.

    Raises:
        ConfigError: the client can't be started, sent no request, or doesn't name its version.
        StorageError: the harness can't be written.
    """
    from replay_pipeline.ingesters.harness.record import record

    harness = record(command, agent=agent, version=version, timeout_s=timeout_s)
    place = HarnessStore(project.root.path).keep(harness)
    return {**_summary(harness), "kept": str(place)}


def list_harnesses(project: "Project") -> dict[str, Any]:
    """Return the recorded harnesses, and the harness that the sessions of each client use."""
    store = HarnessStore(project.root.path)
    sessions: Counter[tuple[str, str, str]] = Counter()
    for batch in project.root.batches("sessions"):
        table = project.root.read("sessions", batch, columns=["agent", "versions", "entrypoint"])
        for row in table.to_pylist():
            version = (row["versions"] or [""])[-1]
            sessions[row["agent"] or "", version, row["entrypoint"] or ""] += 1
    clients = []
    for (agent, version, entrypoint), n_sessions in sorted(sessions.items()):
        found = store.find(agent, version or None, entrypoint or None)
        is_on = project.settings.ingest.harness == "auto"
        shown = "neutral" if found is None or not is_on else found.note or found.harness.version
        clients.append(
            {
                "agent": agent,
                "version": version,
                "entrypoint": entrypoint,
                "sessions": n_sessions,
                "harness": shown,
            }
        )
    return {"harnesses": [_summary(harness) for harness in store], "clients": clients}


def _summary(harness: Harness) -> dict[str, Any]:
    return {
        "agent": harness.agent,
        "version": harness.version,
        "entrypoint": harness.entrypoint,
        "sha": harness.sha,
        "system_chars": sum(map(len, harness.system)),
        "tools": len(harness.tools),
        "tool_chars": len(json.dumps(harness.tools)),
        "reminders": len(harness.before) + len(harness.after),
        "slots": harness.slots(),
    }
