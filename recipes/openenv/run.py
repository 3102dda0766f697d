"""GRPO with real tool calls against the trace-replay environment, on a tiny model.

    python recipes/openenv/run.py --dataset demo/dataset --output demo/openenv

Starts the environment server, unless --url names one. Random weights never call a tool, so a tiny
model first learns the form of the dataset's actions by cross-entropy; then TRL samples, calls the
server's tools, and all three channels train.
"""

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from trainer.__main__ import read_config
from trainer.data.collator import ComposerDataCollator
from trainer.data.dataset import load_preference_data
from trainer.data.rendering import Renderer
from trainer.data.tiny import corpus, make_model, train_tokenizer
from trainer.engines.openenv.client import environment_factory, list_tools
from trainer.engines.settings_file import read_settings
from trainer.engines.trl.run import RunParts, run
from trainer.losses.compose import compose_loss

SETTINGS = Path(__file__).with_name("settings.yaml")


@contextmanager
def server(dataset: str, url: str | None) -> Iterator[str]:
    """The address of the environment: the given one, or that of a process of our own."""
    if url is not None:
        yield url
        return
    command = [Path(sys.executable).with_name("replay-pipeline"), "workspace", "serve"]
    process = subprocess.Popen(
        [*command, "--dataset", dataset, "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.communicate(timeout=30)


def warm_up(
    dataset: str, address: str, folder: Path, settings: dict[str, Any], trl: dict[str, Any]
) -> float:
    """A tiny model that writes actions in the dataset's form, saved; its last cross-entropy."""
    data = load_preference_data(dataset)
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool["description"],
                "parameters": tool["input_schema"],
            },
        }
        for tool in list_tools(address)
    ]
    tokenizer = train_tokenizer(corpus(data.pairs), vocab_size=settings["tiny"]["vocab_size"])
    shape = {k: v for k, v in settings["tiny"].items() if k != "vocab_size"}
    model = make_model(tokenizer, seed=trl["seed"], **shape)
    # As TRL will render them: cut to the budget, then every tool of the server on top.
    cut = Renderer(tokenizer=tokenizer, max_prompt_tokens=trl["max_prompt_tokens"]).within_budget
    collator = ComposerDataCollator(tokenizer, max_prompt_tokens=2048)
    rows = [
        {
            "prompt": cut(row["prompt"]),
            "tools": tools,
            "chosen": [action],
            "rejected": [action],
        }
        for row in data.pairs
        for action in map(calls_only, (row["chosen"][-1], row["rejected"][-1]))
        if action["tool_calls"]
        and len(collator.renderer.response_ids(action)) <= settings["warm_up_tokens"]
    ]
    draw = random.Random(trl["seed"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    loss = float("nan")
    for _ in range(settings["warm_up_steps"]):
        parts = compose_loss(model, collator(draw.sample(rows, min(8, len(rows)))))
        optimizer.zero_grad()
        parts.total.backward()
        optimizer.step()
        loss = parts.metrics["policy/loss"]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return loss


def calls_only(action: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": action.get("tool_calls") or []}


def mean(rows: list[dict[str, Any]], name: str) -> float:
    values = [row[name] for row in rows if name in row]
    return sum(values) / len(values)


def main() -> int:
    parser = argparse.ArgumentParser(description="GRPO on recorded states, with tool calls.")
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--url", help="an OpenEnv server; by default one is started")
    parser.add_argument("--config", type=Path, default=SETTINGS)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformers_logging.disable_progress_bar()

    overrides = [f"dataset={options.dataset}", f"output={options.output}", *options.overrides]
    values = read_config(options.config, overrides)
    own = values.pop("engines")["openenv"]
    with server(options.dataset, options.url) as address:
        print(f"1. environment at {address}")
        if values.get("model") is None:
            values["model"] = str(options.output / "warm")
            loss = warm_up(options.dataset, address, Path(values["model"]), own, values["trl"])
            print(f"2. warm-up: cross-entropy {loss:.2f}")
        factory, outcomes = environment_factory(address, name="TraceReplay")
        report = run(read_settings(values), parts=RunParts(environment=factory))
    lines = (options.output / "metrics.jsonl").read_text("utf-8").splitlines()
    steps = [row for row in map(json.loads, lines) if "tools/call_frequency" in row]
    half = len(steps) // 2
    first, second = (
        mean(rows, "rewards/TraceReplay/mean") for rows in (steps[:half], steps[half:])
    )
    print(f"3. channels live: {', '.join(report['channels_live'])}; off: {report['channels_off']}")
    print(
        f"4. {outcomes.n_calls} calls, {outcomes.n_refused} refused, {outcomes.n_failed} without "
        f"an answer; {mean(steps, 'tools/call_frequency'):.2f} calls a rollout"
    )
    print(f"5. reward {first:.3f} in the first half, {second:.3f} in the second")
    # Few states have a hint: a short run may draw none of them, and channel 2 is off then.
    has_channels = {"policy", "replay"} <= set(report["channels_live"])
    is_good = has_channels and outcomes.n_calls > 0 == outcomes.n_failed
    print("PASS" if is_good else "FAIL")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
