"""Teachers that look before they act, for the loopback server, and a client that answers their looks."""

from collections.abc import Iterable, Mapping

from replay_pipeline.types import LookAnswer, Message, TraceState
from tests.support.messages import bash, call

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("Read", "Bash", "TodoWrite")
]


def look(number: int) -> Message:
    return call("Read", file_path=f"/w/{number}.py")


ACT = bash("make install")


def looking(
    state_ids: Iterable[str], model: str, n_looks: Mapping[str, int]
) -> dict[str, dict[str, Message]]:
    """Recorded answers of one model that looks so often at each state, then acts."""
    found: dict[str, dict[str, Message]] = {}
    for state_id in state_ids:
        steps = [*map(look, range(n_looks[state_id])), ACT]
        found |= {f"{state_id}+{n}" if n else state_id: {model: s} for n, s in enumerate(steps)}
    return found


def answer_looks(state: TraceState, action: Message) -> list[LookAnswer] | None:
    """What a client shows of each file; of `/w/9.py` nobody knows."""
    paths = [each["function"]["arguments"] for each in action["tool_calls"]]
    if any("9.py" in path for path in paths):
        return None
    n_before = sum(message["role"] == "tool" for message in state["messages"])
    return [LookAnswer(text=f"{n_before} {path}", source="files") for path in paths]
