"""What a dollar buys: sessions, teachers, pairs and models by the product's own commands, and what the models do.

    python recipes/what_a_dollar_buys/run.py build/dollar --size quick

Each part is kept in the folder as soon as it is whole, and a second call goes on from there.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import table
import torch
from tasks import DRAWN, Repository, repositories, scripted_answers, write_sessions
from transformers import AutoModelForCausalLM, AutoTokenizer

from replay_pipeline.replay import ledger_status
from replay_pipeline.testing import TeacherServer
from trainer.data.acting import greedy_ids
from trainer.data.collator import ComposerDataCollator
from trainer.data.evaluation import preference_score
from trainer.data.rewards import parse_action
from trainer.model.packing import enable_tree_attention, packed_pair_logps

HERE = Path(__file__).parent
PLAN = tomllib.loads((HERE / "arms.toml").read_text("utf-8"))
WEIGHTS = HERE.parents[1] / "build/real-model/smollm2-135m-instruct"
TRAINER = (sys.executable, "-m", "trainer")
PRODUCT = Path(sys.executable).with_name("replay-pipeline")


def command(*words: str | Path, log: Path) -> None:
    """Run a command of the product; what it says goes to a log. Raises SystemExit if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(map(str, words))}\n")
        file.flush()
        done = subprocess.run([str(word) for word in words], stdout=file, stderr=file, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{words[0]} {words[1]} ended with {done.returncode}: see {log}")


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """Return the JSON of a part that is whole, or make it and keep it with its CPU seconds."""
    if not path.exists():
        before = sum(os.times()[:4])  # of this process, and of those that it waited for
        found = {"value": make(), "cpu_s": round(sum(os.times()[:4]) - before, 1)}
        path.parent.mkdir(parents=True, exist_ok=True)
        (unfinished := path.with_suffix(".unfinished")).write_text(json.dumps(found), "utf-8")
        unfinished.rename(path)
    return json.loads(path.read_text("utf-8"))["value"]


def train(model: Path, dataset: Path, output: Path, settings: Mapping[str, Any]) -> Path:
    """Train by `replay-train`; give the checkpoint."""
    values = {"model": model, "dataset": dataset, "output": output, **settings}
    sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    command(*TRAINER, "--config", HERE / "train.yaml", *sets, log=output.with_suffix(".log"))
    return output / "checkpoint"


class Policy:
    """A checkpoint that acts in repositories, with the trainer's own rendering."""

    def __init__(self, model: Path) -> None:
        """Load it."""
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        sizes = {"max_prompt_tokens": 192, "max_response_tokens": 64}
        self.collator = ComposerDataCollator(self.tokenizer, **sizes, with_tools=False)

    def act(self, asked: Sequence[Repository]) -> list[dict[str, Any]]:
        """Return the greedy action at each repository."""
        ids = [self.collator.renderer.prompt_ids(one.prompt) for one in asked]
        written = greedy_ids(self.model, self.tokenizer, ids, max_new_tokens=48)
        decode = self.tokenizer.decode
        return [parse_action(decode(each, skip_special_tokens=True)) for each in written]

    def ranks(self, asked: Sequence[Repository]) -> list[bool]:
        """Say of each repository whether a right action is likelier per token than a wrong one."""
        rows: Any = []
        for one in asked:
            draw = random.Random(one.id)
            right, wrong = one.right_action(draw), one.wrong_action(draw)
            rows.append({"prompt": one.prompt, "chosen": [right], "rejected": [wrong]})
        enable_tree_attention(self.model)  # both sides read their prompt once
        score = preference_score(self.model, self.collator, rows, forward=packed_pair_logps)
        return [margin > 0 for margin in score.margins]


@contextmanager
def served(models: Mapping[str, Path]) -> Iterator[dict[str, str]]:
    """Serve checkpoints as teachers, each by a process of its own; give their addresses by name."""
    running = {}
    try:
        for name, folder in models.items():
            serve = [sys.executable, HERE / "serve.py", "--model", str(folder), "--name", name]
            running[name] = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
        yield {n: json.loads(each.stdout.readline())["base_url"] for n, each in running.items()}
    finally:
        for process in running.values():
            process.terminate()
            process.wait()


def chain(folder: Path, *commands: Sequence[str | Path]) -> None:
    """Run commands of the product, one after another, on the data and the settings of a folder."""
    where = ("--data", folder / "data", "--settings", folder / "settings.toml")
    for words in commands:
        command(PRODUCT, *words, *where, log=folder / "log.txt")


def buy(
    folder: Path, sessions: Path, addresses: Mapping[str, str], purchase: Mapping[str, Any],
    usd: float,
) -> None:  # fmt: skip
    """Take sessions to a dataset for so many dollars: five commands and one settings file."""
    tables = [("", PLAN["pipeline"] | {k: v for k, v in purchase.items() if "." in k})]
    for teacher in PLAN["teachers"][: purchase.get("n_teachers")]:
        address = addresses[teacher["model"]]
        dialect, at_once = ("openrouter", 2) if address.endswith("/api/v1") else ("vllm", 8)
        own = {"base_url": address, "dialect": dialect, "max_concurrency": at_once}
        tables += [("[[replay.teachers]]", PLAN["asked"] | teacher | own)]
    lines = [line for head, of in tables
             for line in (head, *(f"{key} = {json.dumps(value)}" for key, value in of.items()))]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.toml").write_text("\n".join(lines) + "\n", "utf-8")
    bought = ("replay", "--budget", str(usd), "--yes")
    chain(folder, ("ingest", sessions), bought, ("pairs",), ("normalize",), ("publish",))


def worth(data: Path, asked: Sequence[Repository]) -> dict[str, Any]:
    """Say what a dataset cost and how right it is, by running its actions."""
    by_id, right = {one.id: one for one in asked}, {}
    for side in ("chosen", "rejected", "action"):
        name = "positives" if side == "action" else "dpo_pairs"
        key = "action_json" if side == "action" else f"{side}_action_json"
        files = sorted((data / name).rglob("*.parquet"))
        rows = [row for file in files for row in pq.read_table(file).to_pylist()]
        did = [by_id[row["session_id"]].run(json.loads(row[key]))[0] for row in rows]
        right[side] = [one == "right" for one in did]
    spent = ledger_status(data / "ledger.sqlite")
    pairs = list(zip(right["chosen"], right["rejected"], strict=True))
    return {
        "n_calls": sum(spent.calls.values()),
        "usd": spent.spent_usd,
        "n_pairs": len(pairs),
        "n_right_pairs": sum(chosen and not rejected for chosen, rejected in pairs),
        "n_positives": len(right["action"]),
    } | {f"{side}_right": sum(m) / len(m) if m else None for side, m in right.items()}


class Work:
    """The parts of one run in its folder; each is made once."""

    def __init__(self, out: Path, model: Path, size: Mapping[str, Any], draw: int = 0) -> None:
        """Draw the repositories; `draw` is their seed."""
        self.out, self.model, self.size = out, model, size
        drawn = {name: size[name] for name in ("n_form", "n_train", "n_test")}
        drawn |= {"seed": draw, "tasks": draw}
        self.repositories = repositories(**drawn)
        # For the reward, which the trainer loads.
        os.environ.update({DRAWN: json.dumps(drawn), "PYTHONPATH": str(HERE)})  # noqa: TID251
        out.mkdir(parents=True, exist_ok=True)
        identity = json.dumps([size, draw, model.name])
        if (kept_as := out / "run.json").exists() and kept_as.read_text("utf-8") != identity:
            raise SystemExit(f"{out}: another run is there; name another folder")
        kept_as.write_text(identity, "utf-8")

    def of(self, *splits: str) -> list[Repository]:
        """Return the repositories of these splits."""
        return [one for one in self.repositories if one.split in splits]

    def agent(self) -> Path:
        """Teach the model to call tools, on other tasks; it becomes the agent, and then the trainee."""
        taught, steps = self.of("form"), self.size["form_steps"]
        make = partial(self._taught, self.model, self.out / "agent", taught, steps, 0)
        return Path(kept(self.out / "agent.json", make))

    def teachers(self, regime: str) -> dict[str, Path]:
        """Train three teachers, each on two of three thirds of other repositories.

        `on_agent` ones start from the agent and get ahead of it; others start where it started.
        """
        drawn = repositories(n_form=0, n_train=self.size["n_train"], n_test=0, seed=1000)
        lessons = [replace(one, id=f"lesson-{one.id}") for one in drawn]
        of, made = PLAN["regimes"][regime], {}
        start = self.agent() if of.get("on_agent") else self.model
        for number, teacher in enumerate(PLAN["teachers"]):
            folder = self.out / "teachers" / f"{regime}.{number}"
            taught = [one for i, one in enumerate(lessons) if i % 3 != number]
            make = partial(self._taught, start, folder, taught, of["steps"], number)
            made[teacher["model"]] = Path(kept(folder.parent / f"{folder.name}.json", make))
        return made

    def _taught(
        self, model: Path, folder: Path, taught: Sequence[Repository], steps: int, seed: int
    ) -> str:
        draw = random.Random(seed)
        write_sessions(folder / "sessions", taught, [one.wrong_action(draw) for one in taught])
        every = {"pairs.min_p_better": 0}
        self.bought(folder, folder / "sessions", taught, 0.0, "perfect", every, 10.0)
        settings = PLAN["settings"]["sft"] | {"trl.max_steps": steps, "trl.seed": seed}
        return str(train(model, folder / "data" / "dataset", folder / "model", settings))

    def sessions(self) -> tuple[Path, float]:
        """Let the agent act in the repositories to train on, and log it; give also how often it is right."""
        asked, folder = self.of("train"), self.out / "sessions"

        def make() -> dict[str, Any]:
            done = Policy(self.agent()).act(asked)
            write_sessions(folder, asked, done)
            did = [one.run(action)[0] for one, action in zip(asked, done, strict=True)]
            return {"right": did.count("right") / len(did), "n": len(did)}

        return folder, kept(folder.with_suffix(".json"), make)["right"]

    def bought(
        self, folder: Path, sessions: Path, asked: Sequence[Repository], agent: float, regime: str,
        purchase: Mapping[str, Any], usd: float,
    ) -> None:  # fmt: skip
        """Serve the teachers of a regime and buy from them."""
        shutil.rmtree(folder / "data", ignore_errors=True)
        if regime.startswith("trained."):
            with served(self.teachers(regime)) as addresses:
                return buy(folder, sessions, addresses, purchase, usd)
        models, of = [teacher["model"] for teacher in PLAN["teachers"]], PLAN["regimes"][regime]
        with TeacherServer(scripted_answers(sessions, asked, models, of, agent=agent)) as server:
            return buy(folder, sessions, dict.fromkeys(models, server.base_url), purchase, usd)

    def purchase(self, regime: str, name: str, usd: float) -> tuple[Path, dict[str, Any]]:
        """Buy a dataset once; give its folder and what it is worth."""
        folder = self.out / "bought" / f"{regime}, {name}, {usd:g}"

        def make() -> dict[str, Any]:
            (sessions, agent), asked = self.sessions(), self.of("train")
            self.bought(folder, sessions, asked, agent, regime, PLAN["purchases"][name], usd)
            return worth(folder / "data", asked)

        return folder / "data", kept(folder / "worth.json", make)

    def arm(self, regime: str, arm: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Train one arm by one seed and see what it does at the repositories to test on."""
        make = partial(self._arm, regime, arm, seed)
        return kept(self.out / "arms" / f"{regime}, {arm['name']}, {seed}.json", make)

    def _arm(self, regime: str, arm: Mapping[str, Any], seed: int) -> dict[str, Any]:
        folder = self.out / "arms" / f"{regime}, {arm['name']}, {seed}"
        model, report, bought = self.agent(), {}, {}
        if "purchase" in arm:
            regime = arm.get("regime", regime)
            data, bought = self.purchase(regime, arm["purchase"], self.size["usd"])
            if not bought["n_pairs"]:
                return {"bought": bought, "outcomes": []}
            settings = {"trl.max_steps": self.size["steps"], "trl.seed": seed}
            settings |= PLAN["settings"][arm["settings"]] | arm.get("also", {})
            model = train(model, data / "dataset", folder / "round-0", settings)
            report = json.loads((model.parent / "report.json").read_text("utf-8"))
        tested, policy = self.of("new_repositories", "new_families"), Policy(model)
        seen = zip(tested, policy.act(tested), policy.ranks(tested), strict=True)
        outcomes = [
            [one.id, one.family.name, one.split, one.run(action)[0], is_ranked]
            for one, action, is_ranked in seen
        ]
        if model != self.agent():
            shutil.rmtree(folder)  # weights of half a gigabyte; what they did is what counts
        bought |= {"usd": 0.0} if arm.get("is_free") else {}
        return {"bought": bought, "outcomes": outcomes, "report": report}


def is_asked(arm: Mapping[str, Any], regime: str, options: Any, *, is_first: bool) -> bool:
    """Say whether an arm runs by the first or a further seed; where none are named, `arms.toml` decides."""
    if options.arms is not None:
        return arm["name"] in options.arms and (is_first or "purchase" in arm)
    if regime != "stronger":
        return is_first and "is_everywhere" in arm
    return (options.size != "quick" or "is_quick" in arm) and (is_first or "is_candidate" in arm)


def main() -> int:
    """Run what is asked for, and write the table; 1 if a control passes the check that it must fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", default="full", choices=PLAN["sizes"])
    parser.add_argument("--model", type=Path, default=WEIGHTS)
    parser.add_argument("--regimes", nargs="+", choices=PLAN["regimes"])
    parser.add_argument("--arms", nargs="*", help="of arms.toml; without a name none")
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--draw", type=int, default=0, help="seed of repositories and requests")
    parser.add_argument("--map", nargs="*", type=float, default=(), help="shares of the dollars")
    options = parser.parse_args()
    work = Work(options.folder, options.model, PLAN["sizes"][options.size], options.draw)
    for share, regime, name in product(options.map, *PLAN["mapped"].values()):
        work.purchase(regime, name, round(share * work.size["usd"], 6))
    is_part = options.arms is not None or options.size == "quick"
    planned = [name for name, of in PLAN["regimes"].items() if "by_name" not in of]
    regimes = options.regimes or (["stronger"] if is_part else planned)
    seeds = options.seeds or ([0] if options.size == "quick" else [0, 1, 2])
    for seed, regime, arm in product(seeds, regimes, PLAN["arms"]):
        if is_asked(arm, regime, options, is_first=seed == seeds[0]):
            work.arm(regime, arm, seed)
            table.write(options.folder, PLAN)
    return table.report(table.write(options.folder, PLAN))


if __name__ == "__main__":
    sys.exit(main())
