"""How fast states are judged, and how many agreements string equality would miss.

    python benchmarks/agreement.py [N_STATES]

Generates states with five teachers each (tools as often as in real sessions, each teacher with
its own spelling) and runs `extract_pairs` on one core.
"""

import gc
import json
import random
import sys
import time

from replay_pipeline.judge.extract import extract_pairs
from replay_pipeline.types import TeacherAction, TraceState

MARK_STATES_PER_S = 5_000
TEACHERS = ("deepseek", "qwen", "glm", "kimi", "mistral")
CWD = "/home/ada/shop"
TOOLS = (("Bash", 31), ("Read", 24), ("Edit", 20), ("Grep", 12), ("text", 9), ("two", 4))


def intents(draw: random.Random, n: int) -> list[tuple[str, dict[str, object]]]:
    """The calls that one mind would make: `n` of them, or none for a final text."""
    names, shares = zip(*((t, s) for t, s in TOOLS if t not in ("text", "two")), strict=True)
    return [_intent(draw, draw.choices(names, shares)[0]) for _ in range(n)]


def _intent(draw: random.Random, tool: str) -> tuple[str, dict[str, object]]:
    file = f"src/{draw.choice('abcdefgh')}{draw.randrange(400)}.py"
    if tool == "Bash":
        commands = (
            f"pytest -q -x tests/test_{draw.randrange(400)}.py",
            f"git diff --stat -- {file}",
            f"grep -rn name_{draw.randrange(900)} src | head -n 20",
            f"python -m mypy {file} && git add {file}",
            f"cat > {file} <<'EOF'\nvalue = {draw.randrange(900)}\nEOF",
        )
        return tool, {"command": draw.choice(commands)}
    if tool == "Read":
        return tool, {"file_path": file, "offset": draw.randrange(1, 400), "limit": 120}
    if tool == "Edit":
        n = draw.randrange(900)
        return tool, {"file_path": file, "old_string": f"x = {n}", "new_string": f"x = {n + 1}"}
    return tool, {"pattern": f"name_{draw.randrange(900)}", "path": "src"}


def spelled(draw: random.Random, calls: list[tuple[str, dict[str, object]]]) -> dict[str, object]:
    """The message of one teacher: the same calls in its own spelling."""
    made = []
    for tool, intent in calls:
        arguments = dict(intent)
        style = draw.randrange(4)
        if tool == "Bash":
            command = str(arguments["command"])
            arguments["command"] = (
                command,
                f"cd {CWD} && {command}",
                command.replace("-q -x", "-x -q").replace(" -rn ", " -n -r "),
                f"{command}  # check",
            )[0 if "<<" in command else style]
            arguments["description"] = f"Step {draw.randrange(99)}"
        elif "file_path" in arguments and style:
            arguments["file_path"] = f"{CWD}/{arguments['file_path']}"
        if tool == "Edit" and style > 1:
            for key in ("old_string", "new_string"):
                arguments[key] = f"def f():\n    {arguments[key]}\n"
        if tool == "Grep" and style > 1:
            arguments["-n"] = True
        text = json.dumps(arguments, indent=style or None)
        made.append({"id": f"call_{draw.random()}", "function": {"name": tool, "arguments": text}})
    return {"role": "assistant", "content": draw.choice(["", "Let me look."]), "tool_calls": made}


def message(draw: random.Random, kind: str, calls: list) -> dict[str, object]:
    if kind == "text":
        return {"role": "assistant", "content": f"Done with step {draw.randrange(5)}."}
    return spelled(draw, calls)


def states_and_answers(n: int) -> tuple[list[TraceState], list[TeacherAction]]:
    """`n` states and five answers to each; about two thirds of the minds agree."""
    draw = random.Random(7)
    kinds, shares = zip(*TOOLS, strict=True)
    states: list[TraceState] = []
    rows: list[TeacherAction] = []
    for number in range(n):
        kind = draw.choices(kinds, shares)[0]
        n_calls = {"text": 0, "two": 2}.get(kind, 1)
        consensus = intents(draw, n_calls)
        action = consensus if draw.random() < 0.5 else intents(draw, n_calls)
        state_id = f"s{number}"
        states.append(
            {
                "state_id": state_id,
                "session_id": f"session{number // 50}",
                "turn_idx": number % 50,
                "messages": [{"role": "user", "content": "Go on."}],
                "student_action": message(draw, kind, action),
                "student_model": "claude-sonnet-4-5",
                "cwd": CWD,
                "outcome": "ok",
            }
        )
        for teacher in TEACHERS:
            own = consensus if draw.random() < 0.65 else intents(draw, n_calls)
            rows.append(
                TeacherAction(
                    state_id=state_id,
                    teacher=teacher,
                    family=teacher,
                    action=message(draw, kind, own),
                    cost_usd=0.001,
                )
            )
    return states, rows


def agreeing_by_string(states: list[TraceState], rows: list[TeacherAction]) -> int:
    """States at which two teachers wrote the same calls, character for character."""
    seen: dict[str, list[str]] = {}
    for row in rows:
        made = (row.action or {}).get("tool_calls") or [{"function": row.action}]
        seen.setdefault(row.state_id, []).append(json.dumps([one["function"] for one in made]))
    return sum(len(set(seen[s["state_id"]])) < len(seen[s["state_id"]]) for s in states)


def main() -> None:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    states, rows = states_and_answers(n)
    gc.collect()
    gc.freeze()  # the generated input is not what is measured
    started = time.process_time()
    report = extract_pairs(states, rows)
    seconds = time.process_time() - started
    agreeing = report.outcome_counts.get("pair", 0) + report.outcome_counts.get("agreement", 0)
    by_string = agreeing_by_string(states, rows)
    speed = n / seconds
    print(f"{n:,} states x {len(TEACHERS)} teachers: {seconds:.2f} s CPU, {speed:,.0f} states/s")
    print(f"mark {MARK_STATES_PER_S:,} states/s: {speed / MARK_STATES_PER_S:.2f} x")
    print(f"outcomes {report.outcome_counts}; {len(report.pairs)} pairs")
    print(
        f"states with a consensus: {agreeing:,}, by string equality {by_string:,} "
        f"({agreeing / max(by_string, 1):.1f} x)"
    )


if __name__ == "__main__":
    main()
