"""What a token budget leaves of real prompts, by chat template: changed, used, refused, counted.

    python benchmarks/budget.py ~/.claude/projects --tokenizer build/real-model/smollm2-135m-instruct

Without sessions it takes the sample, and without a tokenizer one that it learns from them. Each template of TRL's collection is rendered with one tokenizer. A prompt is changed if it fits and
its tokens are not those of the template alone; a refusal is false if the prompt fits, or if the newest
step, the last request and what the action names fit with every other text left out.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import trl
from transformers import AutoTokenizer

from replay_pipeline import ClaudeCodeIngester
from replay_pipeline.testing.sample import SESSIONS_DIR
from trainer.data.rendering import Renderer
from trainer.data.tiny import corpus, train_tokenizer

TEMPLATES = ("own", "qwen2_5", "qwen3", "llama3_1", "gemma3")
UNLIMITED = 1 << 30


def states_of(folder: Path, *, n_states: int, n_files: int, seed: int) -> list[dict[str, Any]]:
    """Draw states of a folder's sessions, few of each file, so that many sessions are seen."""
    rng = random.Random(seed)
    paths = sorted(folder.rglob("*.jsonl"))
    drawn: list[dict[str, Any]] = []
    for path in rng.sample(paths, min(n_files, len(paths))):
        states = [state for state in ClaudeCodeIngester().ingest(path) if state["messages"]]
        drawn += [dict(one) for one in rng.sample(states, min(len(states), 4))]
    return rng.sample(drawn, min(n_states, len(drawn)))


def renderer_of(tokenizer: str, template: str, budget: int) -> Renderer:
    """Return a renderer with a template of TRL's collection, or the tokenizer's own."""
    made = AutoTokenizer.from_pretrained(tokenizer)
    if template != "own":
        path = Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja"
        made.chat_template = path.read_text("utf-8")
    return Renderer(tokenizer=made, max_prompt_tokens=budget)


def look(
    states: list[dict[str, Any]], tokenizer: str, template: str, budget: int
) -> dict[str, Any]:
    """Count what one budget does to these prompts below one template."""
    whole, renderer = (renderer_of(tokenizer, template, n) for n in (UNLIMITED, budget))
    seen, used, began_s = Counter(), [], time.process_time()
    for state in states:
        tools, sides = state.get("tools"), [state["student_action"]]
        # The template alone, past everything that counts or cuts.
        full = whole._prompt_of(whole._ready(state["messages"]), tools)
        ids, cut = renderer.prompt(state["messages"], tools, sides=sides)
        fits = len(full) <= budget
        seen.update(
            prompts=1,
            fit=fits,
            changed=fits and ids != full,
            said_to_be_cut=fits and bool(cut),
            cut_and_not_counted=not fits and not cut,
            over_budget=len(ids) > budget,
            refused=bool(cut.refusal),
            falsely_refused=bool(cut.refusal) and (fits or least_fits(renderer, state, budget)),
        )
        if not fits and ids:
            used.append(len(ids) / budget)
    mean = round(sum(used) / len(used), 3) if used else None
    spent = time.process_time() - began_s
    return {"template": template, "budget": budget, **seen, "used": mean, "cpu_s": round(spent, 1)}


def least_fits(renderer: Renderer, state: dict[str, Any], budget: int) -> bool:
    """Whether the last request, the newest step and the texts that the action names would fit."""
    messages = renderer._ready(state["messages"])
    requests = [m for m in messages if m["role"] == "user"][-1:]
    last = max((i for i, m in enumerate(messages) if m["role"] != "tool"), default=0)
    named = [
        value
        for call in state["student_action"].get("tool_calls") or ()
        for name, value in json.loads(call["function"]["arguments"]).items()
        if name in ("file_path", "path", "notebook_path", "old_string") and isinstance(value, str)
    ]
    short = [{**m, "content": m["content"][:40]} for m in [*requests, *messages[last:]]]
    least = [*short, {"role": "user", "content": "\n".join(named)}]
    return len(renderer._prompt_of(least, None)) <= budget // 2


def learned(states: list[dict[str, Any]], folder: str) -> str:
    """Train a tokenizer on these states, and return the folder it is saved in."""
    sides = ("chosen", "rejected")
    rows = [
        {"prompt": state["messages"]} | {side: [state["student_action"]] for side in sides}
        for state in states
    ]
    train_tokenizer(corpus(rows), vocab_size=4096).save_pretrained(folder)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sessions", type=Path, nargs="?", default=SESSIONS_DIR)
    parser.add_argument("--tokenizer", help="folder of a tokenizer")
    parser.add_argument("--templates", nargs="*", default=list(TEMPLATES))
    parser.add_argument("--budgets", nargs="*", type=int, default=[2048, 8192])
    parser.add_argument("--states", type=int, default=60)
    parser.add_argument("--files", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    states = states_of(
        options.sessions, n_states=options.states, n_files=options.files, seed=options.seed
    )
    rows = []
    with tempfile.TemporaryDirectory() as place:
        tokenizer = options.tokenizer or learned(states, place)
        for template in options.templates:
            for budget in options.budgets:
                rows.append(look(states, tokenizer, template, budget))
                print(json.dumps(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"states": len(states), "rows": rows}, indent=2) + "\n")
    wrong = ("changed", "said_to_be_cut", "cut_and_not_counted", "over_budget", "falsely_refused")
    return int(any(row[name] for row in rows for name in wrong))


if __name__ == "__main__":
    sys.exit(main())
