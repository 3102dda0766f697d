"""Random session logs together with the truth about them.

A tree of turns is drawn first; that is the truth. It is then written as rows the way the agent
writes them: messages split into rows, results out of order, rows without a message in between,
rows copied, a subagent interleaved.
"""

import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.replay_pipeline.ingesters.logs import Log, tool_use


@dataclass(eq=False)
class TrueTurn:
    parent: "TrueTurn | None"
    messages: list[dict[str, Any]]
    message_id: str | None = None
    rows: list[str] = field(default_factory=list)
    """Uuids of the rows that stand for this turn."""

    def prefix(self) -> list[dict[str, Any]]:
        turns, turn = [], self.parent
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        merged: list[dict[str, Any]] = []
        for message in (m for turn in reversed(turns) for m in turn.messages):
            if merged and message["role"] == merged[-1]["role"] == "user":
                merged[-1] = {
                    "role": "user",
                    "content": merged[-1]["content"] + "\n\n" + message["content"],
                }
            else:
                merged.append(message)
        return merged


class RandomLog:
    """A log of about `n_turns` turns, and its decisions in `truth` by message id."""

    def __init__(self, seed: int, n_turns: int = 25) -> None:
        self.random = Random(seed)
        self.log = Log(f"session-{seed}")
        self.truth: dict[str, TrueTurn] = {}
        self.n = 0
        chains = [_Chain(self, {})]
        if self.random.random() < 0.4:
            chains.append(_Chain(self, {"isSidechain": True, "agentId": "side"}))
        for _ in range(n_turns):
            self.random.choice(chains).step()

    def text(self) -> str:
        self.n += 1
        return f"text {self.n} " + 'é\n"\\ '[: self.random.randint(0, 5)]


class _Chain:
    def __init__(self, owner: RandomLog, fields: dict[str, Any]) -> None:
        self.owner = owner
        self.fields = fields
        self.random = owner.random
        self.log = owner.log
        self.turns: list[TrueTurn] = []
        self.tip: TrueTurn | None = None

    def step(self) -> None:
        draw = self.random.random()
        if self.tip is None:
            self.user(None)
        elif draw < 0.06 and not self.fields:
            self.compaction()
        elif draw < 0.14 and self.turns:
            self.user(self.random.choice(self.turns))
        elif draw < 0.3:
            self.user(self.tip)
        self.assistant()

    def parent_row(self, turn: TrueTurn | None) -> str | None:
        return self.random.choice(turn.rows) if turn is not None else None

    def structure(self, turn: TrueTurn, row: str | None) -> str | None:
        """Perhaps rows without a message below `row`; gives the last."""
        while self.random.random() < 0.25:
            kind = self.random.choice(["progress", "system", "attachment"])
            side = {
                "progress": {"data": {"type": "bash_progress", "output": "x" * 20}},
                "system": {"subtype": "turn_duration"},
                "attachment": {"attachment": {"type": "auto_mode"}},
            }[kind]
            row = self.log.row(kind, parent=row, **side, **self.fields)
            turn.rows.append(row)
        return row

    def user(self, parent: TrueTurn | None) -> None:
        text = self.owner.text()
        turn = TrueTurn(parent, [{"role": "user", "content": text}])
        content: Any = text if self.random.random() < 0.5 else [{"type": "text", "text": text}]
        row = self.log.user(content, parent=self.parent_row(parent), **self.fields)
        self.finish(turn, row)

    def finish(self, turn: TrueTurn, row: str) -> None:
        turn.rows.append(row)
        self.structure(turn, row)
        self.turns.append(turn)
        self.tip = turn

    def compaction(self) -> None:
        row = self.log.row("system", subtype="compact_boundary", parent=None)
        text = self.owner.text()
        turn = TrueTurn(None, [{"role": "user", "content": text}])
        self.finish(turn, self.log.user(text, parent=row, isCompactSummary=True))

    def assistant(self) -> None:
        random, log = self.random, self.log
        self.owner.n += 1
        message_id = f"m{self.owner.n}"
        n_calls = random.choice([0, 0, 1, 1, 1, 2, 3])
        texts = [self.owner.text() for _ in range(random.randint(0 if n_calls else 1, 2))]
        calls = [f"{message_id}-t{i}" for i in range(n_calls)]
        turn = TrueTurn(self.tip, [], message_id)
        blocks: list[Any] = [{"type": "thinking", "thinking": "hm", "signature": "s"}]
        blocks += texts
        blocks += [tool_use(c, "Bash", command=f"echo {c}") for c in calls]
        row = self.parent_row(self.tip)
        open_calls: list[tuple[str, str]] = []
        results: dict[str, str] = {}
        while blocks:
            n_blocks = random.choice([1, 1, 1, 2])
            now, blocks = blocks[:n_blocks], blocks[n_blocks:]
            row = log.says(message_id, *now, parent=row, **self.fields)
            turn.rows.append(row)
            row = self.structure(turn, row) or row
            open_calls += [(b["id"], row) for b in now if isinstance(b, dict) and "id" in b]
            while open_calls and random.random() < 0.4:
                self.answer(open_calls, results, turn)
        while open_calls:
            if random.random() < 0.05:
                open_calls.pop()
            else:
                self.answer(open_calls, results, turn)
        action = {"role": "assistant", "content": "\n\n".join(texts)}
        if calls:
            action["tool_calls"] = [
                {
                    "id": c,
                    "type": "function",
                    "function": {"name": "Bash", "arguments": json.dumps({"command": f"echo {c}"})},
                }
                for c in calls
            ]
        turn.messages = [
            action,
            *(
                {"role": "tool", "tool_call_id": c, "content": results.get(c, "[no result]")}
                for c in dict.fromkeys([*results, *calls])
            ),
        ]
        self.owner.truth[message_id] = turn
        self.turns.append(turn)
        self.tip = turn

    def answer(
        self, open_calls: list[tuple[str, str]], results: dict[str, str], turn: TrueTurn
    ) -> None:
        call, row = open_calls.pop(self.random.randrange(len(open_calls)))
        results[call] = self.owner.text()
        block = {"type": "tool_result", "tool_use_id": call, "content": results[call]}
        below = self.log.user([block], parent=row, toolUseResult={"stdout": "x"}, **self.fields)
        turn.rows.append(below)
        self.structure(turn, below)
        if self.random.random() < 0.05:
            self.log.raw(self.random.choice(self.log.lines))
