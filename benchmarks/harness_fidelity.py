"""Do states have the recorded length below the harness that was learned, without any fitted constant?

    python benchmarks/harness_fidelity.py SESSIONS --harness ROOT [--json FILE]

SESSIONS is a folder of Claude Code sessions, ROOT a data root into which `replay-pipeline harness learn` has
learned. The provider recorded how many tokens each prompt had. Ingestion predicts it by the messages and one
constant, fitted to each run of the client, for what no log shows. Here the constant is what the harness
has: system prompt, tools and reminders, by the same estimate per character. What is left, the difference
of the two constants, is what the harness lacks: memory files, the state of git, tools of MCP servers.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from replay_pipeline.harness import HarnessStore
from replay_pipeline.ingesters import Traces, fidelity, ingest, log_rows, state_id_of
from replay_pipeline.ingesters.base import Turn
from replay_pipeline.testing.sample import SESSIONS_DIR

_SENT_TOKENS: dict[str, float] = {}
"""By state, the estimate of the messages alone."""


def _predicted(turns: Sequence[Turn], **how: Any) -> dict[Turn, int]:
    costs = fidelity._Costs()
    for turn in turns:
        costs.add(turn)
        if turn.is_state:
            _SENT_TOKENS[state_id_of(turn)] = costs.before[turn]
    return fidelity.predict_context(turns, **how)


def constant_of(state: Any) -> float:
    """Tokens of the system prompt, the tools and the reminders of a state."""
    n_chars = sum(map(len, state["system"]))
    n_chars += sum(len(json.dumps(tool["function"])) for tool in state["tools"])
    return fidelity.TOKENS_PER_CHAR_TEXT * n_chars


def _kind(state: Any) -> str:
    if ".agent-" in state["session_id"]:
        return "subagents"
    has_servers = any(tool["function"]["name"].startswith("mcp__") for tool in state["tools"])
    return "main, a server's tool called" if has_servers else "main, no server's tool called"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sessions", type=Path, nargs="?", default=SESSIONS_DIR)
    parser.add_argument("--harness", type=Path, help="a data root with learned harnesses")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    log_rows.predict_context = _predicted
    read = ingest(arguments.sessions)
    tables = {name: getattr(read, name) for name in ("sessions", "turns", "states", "tools")}
    fitted = dict(
        zip(
            *(read.states[name].to_pylist() for name in ("state_id", "n_predicted_tokens")),
            strict=True,
        )
    )
    by_version: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    by_kind: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    versions = dict(
        zip(*(read.sessions[name].to_pylist() for name in ("session_id", "versions")), strict=True)
    )
    store = HarnessStore(arguments.harness) if arguments.harness else None
    traces = Traces(**tables, harnesses=store)
    for state in traces.materialize():
        recorded, sent = state["n_context_tokens"], _SENT_TOKENS.get(state["state_id"])
        if not recorded or sent is None or "harness" not in state:
            continue
        constant = constant_of(state)
        version = versions[state["session_id"]][-1]
        figures = (
            fitted[state["state_id"]] / recorded,
            (sent + constant) / recorded,
            recorded - sent - constant,
        )
        by_version[version].append(figures)
        by_kind[_kind(state)].append(figures)
    if not by_version:
        print("no state of a client whose harness was learned; name SESSIONS and --harness ROOT")
        return
    rows = []
    everything = [each for found in by_version.values() for each in found]
    for version, found in [
        *sorted(by_version.items()),
        *sorted(by_kind.items()),
        ("all", everything),
    ]:
        close = [sum(abs(each[n] - 1) <= fidelity.TOLERANCE for each in found) for n in (0, 1)]
        lacking = median(each[2] for each in found)
        rows.append(
            {
                "version": version,
                "n_states": len(found),
                "fitted": close[0] / len(found),
                "harness": close[1] / len(found),
                "lacking_tokens": lacking,
            }
        )
        print(
            f"  {version:28s} {len(found):6,} states  within 10 %: fitted {close[0] / len(found):6.1%}, "
            f"harness {close[1] / len(found):6.1%}; the harness lacks {lacking:+,.0f} tokens (median)"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1), "utf-8")


if __name__ == "__main__":
    main()
