"""What does a recipe drop, why, and of the sound pairs how many? On pairs that nothing was kept out of.

    python benchmarks/drops.py [SESSIONS] [--recipe agent] [--most 4000] [--show 50] [--json FILE]

Each state of the sessions becomes a pair: what two of three teachers that answer by rule (`plausible.py`) agree on, against
what the agent did, unless that is the same. Extraction, which refuses most bad pairs, is left out on purpose. Pairs of
the ways in `SOUND` are possible, new and harmless by construction. With `--show`, so many drops of each reason are
printed to be read: prompt's end, chosen and rejected side. Exit code 1 where fewer than 95 % of the sound pairs stay.
"""

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.plausible import SOUND, played
from replay_pipeline.actions import agreement_level, agrees_at, canonical_action
from replay_pipeline.ingesters import ingest, open_traces, write_traces
from replay_pipeline.judge.records import pairs_table
from replay_pipeline.normalize import DJNormalizer
from replay_pipeline.testing.sample import SESSIONS_DIR
from replay_pipeline.types import DPOPair, TraceState

MARK_KEPT = 0.95


def unjudged_pairs(states: Sequence[TraceState]) -> Iterator[tuple[DPOPair, str]]:
    """Give a pair of each state at which teachers differ from the agent, and the way they took."""
    for state, way, message in played(states):
        cwd, tools = state.get("cwd"), state.get("tools")
        chosen = canonical_action(message, cwd=cwd, tools=tools)
        agent = canonical_action(state["student_action"], cwd=cwd, tools=tools)
        if not chosen.is_valid or not agent.is_valid:
            continue
        if agrees_at("effect", agreement_level(chosen, agent)):
            continue
        pair: Any = {
            "state_id": state["state_id"],
            "session_id": state.get("session_id"),
            "state_messages": state["messages"],
            "tools": tools,
            "cwd": cwd,
            "chosen": chosen.render(),
            "rejected": agent.render(),
            "chosen_action": chosen.to_message(),
            "rejected_action": agent.to_message(),
            "n_teachers_agreeing": 2,
        }
        yield pair, way


def reason_of(drop: dict[str, Any]) -> str:
    """Name why a row was dropped: the operator, or the kind of obstacle that it found."""
    if drop["drop_operator"] == "pair_feasibility_filter":
        return str(drop["drop_value"]).partition(":")[0]
    return str(drop["drop_operator"])


def shown(pair: DPOPair, drop: dict[str, Any], way: str) -> str:
    """Give a drop as a person reads it."""
    lines = [f"{way}: {drop['drop_field']} {str(drop['drop_value'])[:160]}"]
    for message in pair["state_messages"][-8:]:
        calls = message.get("tool_calls") or ()
        lines += [f"    {c['function']['name']} {c['function']['arguments'][:160]}" for c in calls]
        if not calls:
            lines.append(
                f"    {message['role']}: {' '.join(str(message.get('content')).split())[:160]}"
            )
    lines += [f"  chosen   {pair['chosen'][:300]!r}", f"  rejected {pair['rejected'][:160]!r}"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sessions", type=Path, nargs="?", default=SESSIONS_DIR)
    parser.add_argument("--recipe", default="agent")
    parser.add_argument("--most", type=int, default=4_000)
    parser.add_argument("--show", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="drops-") as folder:
        write_traces(ingest([args.sessions]), Path(folder))
        traces = open_traces(Path(folder))
        made = list(unjudged_pairs(list(traces.materialize())))
        random.Random(0).shuffle(made)
        made = made[: args.most]
        ways = {pair["state_id"]: way for pair, way in made}
        pairs = {pair["state_id"]: pair for pair, _ in made}
        found = DJNormalizer(args.recipe).run(
            pairs_table(list(pairs.values())), prompts=traces.materialize
        )
        drops = found.dropped.to_pylist()
    by_reason = Counter(map(reason_of, drops))
    table = Counter((ways[drop["state_id"]], reason_of(drop)) for drop in drops)
    n_of_way = Counter(ways.values())
    print(f"{len(pairs):,} pairs, {len(found.kept):,} kept by `{args.recipe}`")
    print("| the teachers | pairs | " + " | ".join(by_reason) + " | kept |")
    print("|---" * (len(by_reason) + 3) + "|")
    for way, n in sorted(n_of_way.items(), key=lambda one: (one[0] in SOUND, one[0])):
        counts = [table[way, reason] for reason in by_reason]
        cells = " | ".join(f"{count:,}" for count in counts)
        print(f"| {way} | {n:,} | {cells} | {n - sum(counts):,} |")
    n_sound = sum(n_of_way[way] for way in SOUND)
    n_lost = sum(count for (way, _), count in table.items() if way in SOUND)
    print(f"of {n_sound:,} sound pairs {n_sound - n_lost:,} stay: {1 - n_lost / n_sound:.1%}")
    for reason in by_reason if args.show else ():
        of_reason = [drop for drop in drops if reason_of(drop) == reason]
        random.Random(1).shuffle(of_reason)
        print(f"\n== {reason}: {min(args.show, len(of_reason))} of {len(of_reason)}")
        for number, drop in enumerate(of_reason[: args.show], 1):
            print(f"-- {number} {drop['state_id']}")
            print(shown(pairs[drop["state_id"]], drop, ways[drop["state_id"]]))
    if args.json:
        rows = {f"{way}: {reason}": n for (way, reason), n in table.items()}
        figures = {"n_pairs": len(pairs), "n_sound": n_sound, "n_sound_lost": n_lost, "drops": rows}
        args.json.write_text(json.dumps({"benchmark": "drops", **figures}, indent=2) + "\n")
    sys.exit("sound pairs are dropped" if n_lost > (1 - MARK_KEPT) * n_sound else 0)


if __name__ == "__main__":
    main()
