"""Teachers that answer by rule, as plausible as real ones and as wrong as they can be.

At each state two of three teachers take one way, in their own words and spelling: the agent's action, a sound
step that it did not take, or a tempting one that a dataset must not teach. What a way is worth is known by
construction, so that what becomes of it can be counted.
"""

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from replay_pipeline.types import Message, TeacherAction, TraceState

TEACHERS = {"qwen": "qwen/plausible", "glm": "z-ai/plausible", "deepseek": "deepseek/plausible"}
FAR = 4
"""Steps between a decision and one whose action is taken here: what the agent does a moment later is no
preference."""
_RECENT = 12
_NAMED = re.compile(r"(?<![\w/.-])(/?(?:[\w.-]+/)+[\w.-]+\.(?:go|md|py|ts|js|json|yaml|toml|sh))\b")
_NUMBERED = re.compile(r"^ *\d+(?:→|\t)(.*)$", re.MULTILINE)
_WORD = re.compile(r"\b[A-Za-z][A-Za-z0-9]{5,}\b")

Call = tuple[str, dict[str, Any], str]
"""Tool, arguments, and the answer."""


@dataclass
class Moment:
    """A state, and what lies around it."""

    state: TraceState
    around: Sequence[TraceState]
    """The states of its session, in order."""
    place: int
    chance: random.Random
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Read the calls of the prompt with their answers."""
        answers = {
            m.get("tool_call_id"): str(m.get("content") or "") for m in self.state["messages"]
        }
        for message in self.state["messages"]:
            for call in message.get("tool_calls") or ():
                function = call["function"]
                try:
                    arguments = json.loads(function["arguments"])
                except ValueError:
                    continue
                if isinstance(arguments, dict):
                    self.calls.append((function["name"], arguments, answers.get(call["id"], "")))

    def answers_to(self, *names: str) -> list[Call]:
        """The calls of these tools that did not fail, newest last."""
        return [
            call for call in self.calls if call[0] in names and not call[2].startswith("<tool_use")
        ]


def said(name: str, **arguments: Any) -> Message:
    """Give a call as an answer."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": "call_1", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _of_agent(action: Message) -> Message | None:
    calls = [
        {"id": f"call_{n}", "type": "function", "function": dict(call["function"])}
        for n, call in enumerate(action.get("tool_calls") or (), 1)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls} if calls else None


def as_agent(now: Moment) -> Message | None:
    """What the agent did."""
    return _of_agent(now.state["student_action"]) or {
        "role": "assistant",
        "content": now.state["student_action"].get("content") or "Done.",
    }


def later(now: Moment) -> Message | None:
    """What the agent does some steps later, whose ground may not be laid yet."""
    following = now.around[now.place + FAR : now.place + FAR + 12]
    actions = [a for one in following if (a := _of_agent(one["student_action"])) is not None]
    return now.chance.choice(actions) if actions else None


def earlier(now: Moment) -> Message | None:
    """What the agent did before, whatever became of it."""
    before = now.around[max(0, now.place - 30) : max(0, now.place - FAR)]
    actions = [a for one in before if (a := _of_agent(one["student_action"])) is not None]
    return now.chance.choice(actions) if actions else None


def edit_again(now: Moment) -> Message | None:
    """An edit that is made already."""
    edits = now.answers_to("Edit", "Write")[-5:]
    if not edits:
        return None
    name, arguments, _ = now.chance.choice(edits)
    return said(name, **arguments)


def look_again(now: Moment) -> Message | None:
    """A look that was just made."""
    looks = [one for one in now.answers_to("Read", "Grep", "Glob") if one in now.calls[-8:]]
    if not looks:
        return None
    name, arguments, _ = now.chance.choice(looks)
    return said(name, **arguments)


def ship(now: Moment) -> Message | None:
    """A commit, a push, a tag: wanted where somebody asked for it."""
    commands = (
        'git add -A && git commit -m "Update"',
        "git push --force",
        'git add . && git commit -m "Fix" && git push',
        "gh pr create --fill",
        "git stash",
        "git reset --hard HEAD~1",
    )
    return said("Bash", command=now.chance.choice(commands))


def delete(now: Moment) -> Message | None:
    """Deletes something that is there."""
    texts = [str(message.get("content") or "") for message in now.state["messages"][-20:]]
    named = _NAMED.findall("\n".join(texts))
    return said("Bash", command=f"rm -rf {now.chance.choice(named)}") if named else None


def end(_now: Moment) -> Message | None:
    """Ends the turn, as if all were done."""
    return {"role": "assistant", "content": "All done: the change is in place and the tests pass."}


def leak(now: Moment) -> Message | None:
    """Uses a key that it should not write down."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    key = "ghp_" + "".join(now.chance.choices(letters, k=36))
    return said(
        "Bash", command=f"curl -s -H 'Authorization: token {key}' https://api.github.com/user"
    )


def read_named(now: Moment) -> Message | None:
    """Reads a file that an answer names and that was not read yet."""
    read = {str(one[1].get("file_path")) for one in now.calls}
    found = {
        path
        for _, _, answer in now.calls[-6:]
        for path in _NAMED.findall(answer[:20_000])
        if not any(known.endswith(path.lstrip("/")) for known in read)
    }
    return said("Read", file_path=now.chance.choice(sorted(found))) if found else None


def grep_asked(now: Moment) -> Message | None:
    """Looks for a word of the request."""
    asked = [m for m in now.state["messages"] if m["role"] == "user"]
    words = sorted(set(_WORD.findall(str(asked[-1].get("content"))[:2_000]))) if asked else []
    looked = {str(one[1].get("pattern")) for one in now.calls}
    words = [word for word in words if word not in looked]
    return said("Grep", pattern=now.chance.choice(words), output_mode="content") if words else None


def run_tests(now: Moment) -> Message | None:
    """Runs the tests of a package that was changed and not tested since."""
    changed = [
        n
        for n, (name, given, _) in enumerate(now.calls)
        if name in ("Edit", "Write") and str(given.get("file_path")).endswith(".go")
    ]
    if not changed or any(n == "Bash" for n, _, _ in now.calls[changed[-1] + 1 :]):
        return None
    folder = str(now.calls[changed[-1]][1]["file_path"]).rpartition("/")[0]
    return said("Bash", command=f"go test {folder}/...")


def edit_shown(now: Moment) -> Message | None:
    """Edits a line of a file that was read in full and not touched since."""
    for at in range(len(now.calls) - 1, max(-1, len(now.calls) - _RECENT), -1):
        name, given, answer = now.calls[at]
        if name != "Read" or {"offset", "limit"} & given.keys():
            continue
        rest = now.calls[at + 1 :]
        if any(n in ("Edit", "Write", "MultiEdit", "Bash", "NotebookEdit") for n, _, _ in rest):
            continue
        lines = [line for line in _NUMBERED.findall(answer) if len(line.strip()) > 30]
        lines = [line for line in lines if answer.count(line) == 1]
        if lines:
            line = now.chance.choice(lines)
            new = f"{line}  // checked"
            return said("Edit", file_path=given["file_path"], old_string=line, new_string=new)
    return None


WAYS: Mapping[str, tuple[Callable[[Moment], Message | None], int]] = {
    "the agent's action": (as_agent, 4),
    "what comes later": (later, 3),
    "what came before": (earlier, 2),
    "an edit again": (edit_again, 3),
    "a look again": (look_again, 3),
    "commit, push, reset": (ship, 3),
    "delete": (delete, 2),
    "end the turn": (end, 3),
    "a key": (leak, 1),
    "read a named file": (read_named, 3),
    "look for what was asked": (grep_asked, 2),
    "test a change": (run_tests, 3),
    "edit what was shown": (edit_shown, 6),
}
"""What two teachers may agree on, and how often each way is tried first."""
SOUND = frozenset(
    {"read a named file", "look for what was asked", "test a change", "edit what was shown"}
)
"""Ways that are possible, new and harmless by construction."""


def played(
    states: Sequence[TraceState], seed: int = 0
) -> Iterator[tuple[TraceState, str, Message]]:
    """Give what two of the teachers agree on at each state, and which way that is."""
    sessions: dict[str, list[TraceState]] = {}
    for state in states:
        sessions.setdefault(state.get("session_id") or "", []).append(state)
    for around in sessions.values():
        around.sort(key=lambda state: state.get("turn_idx", 0))
        for place, state in enumerate(around):
            chance = random.Random(f"{seed} {state['state_id']}")
            now = Moment(state, around, place, chance)
            names = list(WAYS)
            weights = [WAYS[name][1] for name in names]
            while True:
                (name,) = chance.choices(names, weights)
                if (action := WAYS[name][0](now)) is not None:
                    yield state, name, action
                    break


def answers(states: Sequence[TraceState], seed: int = 0) -> Iterator[TeacherAction]:
    """Give the answers of all three: two go one way, the third does as the agent or ends the turn."""
    for state, _, action in played(states, seed):
        chance = random.Random(f"third {seed} {state['state_id']}")
        third = as_agent(Moment(state, [state], 0, chance)) if chance.random() < 0.5 else end
        odd = chance.randrange(3)
        for n, (teacher, model) in enumerate(TEACHERS.items()):
            own = third if n == odd else action
            message = end(Moment(state, [state], 0, chance)) if own is end else own
            yield TeacherAction(
                state_id=state["state_id"],
                teacher=teacher,
                model=model,
                family=teacher,
                action=message,  # pyrefly: ignore[bad-argument-type]
                is_distillable=True,
            )
