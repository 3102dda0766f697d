"""A small published dataset in the layout of the Hub, of invented sessions. Needs no torch."""

import json
import random
from pathlib import Path

FILES = ("cart.py", "prices.py", "report.py", "parser.py", "index.py", "mail.py", "auth.py")
CARD = """---
configs:
- config_name: pairs
  default: true
  data_files:
  - {split: train, path: pairs/train-*.parquet}
  - {split: test, path: pairs/test-*.parquet}
- config_name: positives
  data_files:
  - {split: train, path: positives/train-*.parquet}
- config_name: prompts
  data_files:
  - {split: train, path: prompts/train-*.parquet}
  - {split: test, path: prompts/test-*.parquet}
---
"""


def assistant(name: str, **arguments: str) -> dict:
    call = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call", "type": "function", "function": call}],
    }


def done(action: dict, step: int, outcome: str) -> list[dict]:
    """An action of a session and its result: ids of calls are unique in a prompt, as endpoints want."""
    [call] = action["tool_calls"]
    name = f"call_{step}"
    answer = {"role": "tool", "tool_call_id": name, "content": outcome}
    return [{**action, "tool_calls": [{**call, "id": name}]}, answer]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": name,
            "parameters": {"type": "object", "properties": {key: {"type": "string"}}},
        },
    }
    for name, key in (("Read", "file_path"), ("Edit", "file_path"), ("Bash", "command"))
]


def session_rows(session: int, n_states: int = 4, n_words: int = 0) -> list[dict]:
    """States of one invented session: the student edits blindly, the teachers read first.

    Each result is followed by so many words that say nothing.
    """
    rng = random.Random(session)
    file = rng.choice(FILES)
    messages: list[dict] = [{"role": "user", "content": f"Fix the failing test of {file}."}]
    rows = []
    for step in range(n_states):
        file = rng.choice(FILES)
        edit = assistant("Edit", file_path=file, old_string="a", new_string="b")
        read = assistant("Read", file_path=file)
        rows.append(
            {
                "state_id": f"s{session}-{step}",
                "session_id": f"s{session}",
                "prompt": list(messages),
                "chosen": [read],
                "rejected": [edit],
                "tools": TOOLS,
                "hint": "Error: file has not been read yet" if step % 2 == 0 else None,
                "weight": 1.0,
                "agreement_level": "exact",
            }
        )
        more = " ".join(rng.choices(FILES, k=n_words))
        outcome = f"Error: file has not been read yet {more}".strip()
        messages = [*messages, *done(edit, step, outcome)]
    return rows


def rows_of(n_sessions: int) -> list[dict]:
    """States of the first `n_sessions` invented sessions."""
    return [row for session in range(n_sessions) for row in session_rows(session)]


def write_dataset(folder: Path, *, n_sessions: int = 8, n_test: int = 3, **sizes: int) -> Path:
    """Write sessions of `sizes`: see `session_rows`."""
    from datasets import Dataset, Features, Json, List, Value, disable_progress_bars

    disable_progress_bars()
    text, message = Value("string"), List(Json())
    shared = {"state_id": text, "session_id": text, "prompt": message, "tools": Json()}
    pair_features = Features(
        shared
        | {"chosen": message, "rejected": message, "hint": text, "agreement_level": text}
        | {"weight": Value("float64")}
    )
    prompt_features = Features(shared | {"consensus": Json(), "hint": text})
    folder.mkdir(parents=True, exist_ok=True)
    for split, sessions in (("train", range(n_test, n_sessions)), ("test", range(n_test))):
        pairs = [row for session in sessions for row in session_rows(session, **sizes)]
        prompts = [
            {k: row[k] for k in (*shared, "hint")} | {"consensus": row["chosen"][0]}
            for row in pairs
        ]
        positives = [
            {k: row[k] for k in (*shared, "hint")}
            | {"completion": row["chosen"]}
            | {"state_id": f"{row['state_id']}-again"}
            for row in pairs[::2]
        ]
        for name, rows, features in (
            ("pairs", pairs, pair_features),
            ("prompts", prompts, prompt_features),
            ("positives", positives, Features(shared | {"completion": message, "hint": text})),
        ):
            (folder / name).mkdir(exist_ok=True)
            Dataset.from_list(rows, features=features).to_parquet(
                folder / name / f"{split}-0.parquet"
            )
    (folder / "README.md").write_text(CARD)
    return folder
