"""Sessions as long as real ones, published: an agent reads this repository's own files, one by one.

The prompts take 1,000 to 60,000 tokens, as those of real coding agents do. The rows have what real
ones have and small ones lack: several calls in one message, results followed by a word of the user, a
request that is longer than the limit, and tools with schemas of their own.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replay_pipeline.publish import publish
from tests.full_tables import full_table
from trainer.data.dataset import load_preference_data
from trainer.data.tiny import corpus, make_model, train_tokenizer

REPO = Path(__file__).parents[2]
LENGTH = 4_096
N_SESSIONS, N_STEPS = 8, 24


def call(number: int, name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"call_{number}", "type": "function", "function": function}


def acting(*calls: dict[str, Any], text: str = "") -> dict[str, Any]:
    return {"role": "assistant", "content": text, "tool_calls": list(calls)}


def tool(name: str, **properties: str) -> dict[str, Any]:
    described = {
        key: {"type": kind, "description": f"The {key} of {name}."}
        for key, kind in properties.items()
    }
    parameters = {"type": "object", "properties": described, "required": list(described)}
    function = {"name": name, "description": f"{name} in the project.", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [tool("Read", file_path="string"), tool("Grep", pattern="string", limit="integer")]
SYSTEM = "You are a coding agent. Read before you write. Working directory: /project"


def session(number: int) -> Iterator[tuple[list[dict[str, Any]], str]]:
    """Give each state's messages, and the file that its consensus reads."""
    files = sorted((REPO / "replay_pipeline").rglob("*.py"))[number::N_SESSIONS]
    request = f"Say what the modules of part {number} do, and where they overlap."
    if number == 1:
        request += "\n" + files[0].read_text("utf-8") * 3
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": request},
    ]
    for step, file in enumerate(files[:N_STEPS]):
        yield list(messages), file.name
        read = call(2 * step, "Read", file_path=file.name)
        look = call(2 * step + 1, "Grep", pattern="def ", limit=step)
        text = "Let me look at both." if step % 5 == 0 else ""
        messages.append(acting(read, look, text=text) if step % 3 else acting(read))
        messages.append(
            {"role": "tool", "tool_call_id": read["id"], "content": file.read_text("utf-8")}
        )
        if step % 3:
            messages.append({"role": "tool", "tool_call_id": look["id"], "content": "12 matches"})
        if step % 7 == 6:
            messages.append({"role": "user", "content": "Go on, but shorter."})


def rows() -> list[dict[str, Any]]:
    made = []
    for number in range(N_SESSIONS):
        for step, (messages, name) in enumerate(session(number)):
            chosen = acting(call(90, "Read", file_path=name))
            wrong = acting(call(90, "Grep", pattern=name, limit=3))
            rejected = [wrong, {"role": "assistant", "content": f"{name} is a helper."}][step % 2]
            made.append(
                {
                    "state_id": f"state-{number}-{step}",
                    "session_id": f"session-{number}",
                    "state_messages_json": json.dumps(messages),
                    "tools_json": json.dumps(TOOLS) if number else None,
                    "chosen": name,
                    "rejected": "other",
                    "chosen_messages_json": json.dumps([chosen]),
                    "rejected_messages_json": json.dumps([rejected]),
                    "teachers_agreeing": ["deepseek", "qwen"],
                    "n_teachers_agreeing": 2,
                    "is_distillable": True,
                    "weight": 1.0,
                }
            )
    return made


def prepare(folder: Path) -> None:
    dataset = folder / "dataset"
    publish([("long", full_table(rows(), "normalized_pairs"))], folder=dataset, lengths=[LENGTH])
    tokenizer = train_tokenizer(corpus(load_preference_data(dataset).pairs), vocab_size=2_048)
    model = make_model(tokenizer, hidden_size=32, n_heads=2, max_positions=2 * LENGTH)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
