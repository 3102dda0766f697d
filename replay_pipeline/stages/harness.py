"""Learn, list, and show the harnesses of a data root."""

import json
import shlex
import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay_pipeline.errors import ConfigError
from replay_pipeline.harness import Harness, HarnessStore
from replay_pipeline.harness.harness import slots_of

if TYPE_CHECKING:
    from replay_pipeline.stages.project import Project


def learn_harness(
    project: "Project",
    *,
    agent: str = "claude_code",
    command: str | None = None,
    version: str | None = None,
    request: Path | None = None,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """Learn the harness of a client, store it in the data root, and return it.

    Args:
        project: the data root.
        agent: name of the client.
        command: command that starts the client. By default, the installed one.
        version: the version to get from npm, or else the version behind `request` or `command`.
        request: a file with a request that was recorded elsewhere, instead of a client.
        timeout_s: longest time for a start, in seconds.

    Raises:
        ConfigError: the client can't be started or sent nothing, or the file contains no request.
        MissingDependencyError: npm or node is needed and isn't installed.
        StorageError: the harness can't be written.
    """
    from replay_pipeline.harness import learn, packages
    from replay_pipeline.harness.clients import CLIENTS

    if agent not in CLIENTS:
        raise ConfigError(f"agent {agent!r} is not one of {', '.join(CLIENTS)}")
    if request is not None:
        if version is None:
            raise ConfigError(
                "a request does not contain the version of its client: pass --version"
            )
        harness = learn.harness_of_request(_read(request), version=version, agent=agent)
    else:
        if command is not None:
            words = shlex.split(command)
        elif version is not None and agent == "claude_code":
            words = packages.fetch(version, project.settings.local_dir() / "clients")
        else:
            program = CLIENTS[agent].program
            if shutil.which(program) is None:
                raise ConfigError(f"{program} is not installed here: name it by --command")
            words = [program]
        harness = learn.learn(
            words, agent=agent, version=version, timeout_s=timeout_s or learn.TIMEOUT_S
        )
    place = HarnessStore(project.root.path).keep(harness)
    return {
        **_summary(harness),
        "kept": str(place),
        "states_shown_anew": _n_states(project, harness),
    }


def list_harnesses(project: "Project") -> dict[str, Any]:
    """Return the learned harnesses, and the harness that the sessions of each client use."""
    store = HarnessStore(project.root.path)
    sessions: Counter[tuple[str, str]] = Counter()
    for batch in project.root.batches("sessions"):
        table = project.root.read("sessions", batch, columns=["agent", "versions"])
        for row in table.to_pylist():
            sessions[row["agent"] or "", (row["versions"] or [""])[-1]] += 1
    clients = []
    for (agent, version), n_sessions in sorted(sessions.items()):
        found = store.find(agent, version or None)
        is_on = project.settings.ingest.harness == "auto"
        shown = "neutral" if found is None or not is_on else found.note or found.harness.version
        clients.append(
            {"agent": agent, "version": version, "sessions": n_sessions, "harness": shown}
        )
    return {"harnesses": [_summary(harness) for harness in store], "clients": clients}


def show_harness(project: "Project", version: str, *, agent: str = "claude_code") -> dict[str, Any]:
    """Return a whole harness.

    Raises:
        ConfigError: no harness of that version was learned.
    """
    for harness in HarnessStore(project.root.path):
        if (harness.agent, harness.version) == (agent, version):
            framings = {
                kind: {
                    "system": framing.system,
                    "tools": framing.tools,
                    "before": framing.before,
                    "after": framing.after,
                    "reminders": {kind: each.text for kind, each in framing.reminders.items()},
                    "params": framing.params,
                    "slots": slots_of(framing),
                    "left_out": framing.left_out,
                }
                for kind, framing in harness.framings.items()
            }
            return {"agent": agent, "version": version, "sha": harness.sha, **framings}
    raise ConfigError(
        f"{agent} {version} was not learned; `replay-pipeline harness list` shows what was"
    )


def _summary(harness: Harness) -> dict[str, Any]:
    kinds = {
        kind: {
            "system_chars": sum(map(len, framing.system)),
            "tools": len(framing.tools),
            "tool_chars": len(json.dumps(framing.tools)),
            "reminders": sum(map(len, (framing.before, framing.after, framing.reminders))),
            "slots": slots_of(framing),
            "left_out": framing.left_out,
        }
        for kind, framing in harness.framings.items()
    }
    named = {"agent": harness.agent, "version": harness.version, "sha": harness.sha}
    return {**named, "how": harness.how, **kinds}


def _n_states(project: "Project", harness: Harness) -> int:
    """Count the states whose prompts this harness changes, so that their teachers are asked again."""
    store = HarnessStore(project.root.path)
    n_states = 0
    for batch in project.root.batches("states"):
        sessions = project.root.read(
            "sessions", batch, columns=["session_id", "agent", "versions"]
        ).to_pylist()
        of_it = set()
        for row in sessions:
            found = store.find(row["agent"], row["versions"][-1] if row["versions"] else None)
            if found is not None and found.harness.sha == harness.sha:
                of_it.add(row["session_id"])
        states = project.root.read("states", batch, columns=["session_id", "shape_turn_idx"])
        n_states += sum(
            session in of_it and shape is None
            for session, shape in zip(
                *(states[name].to_pylist() for name in ("session_id", "shape_turn_idx")),
                strict=True,
            )
        )
    return n_states


def _read(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a readable request ({error})") from error
    if not isinstance(body, dict):
        raise ConfigError(f"{path}: this is not a request: a request is a JSON object")
    return body
