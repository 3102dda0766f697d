"""What do real models' answers, bought by the product, teach a small model?

    python recipes/real_answers/run.py build/real-answers --answers ANSWERS --questions QUESTIONS --size quick

ANSWERS and QUESTIONS are checkouts (see `README.md`). Each part is kept in the folder as soon as it is whole, and a
second call goes on from there.
"""

import argparse
import json
import math
import random
import shutil
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "real_model"))
sys.path.append(str(Path(__file__).parents[1] / "what_a_dollar_buys"))

import asked as bench
from parts import command, kept
from weights import fetch

from benchmarks.scored_answers import (
    PRICES,
    Answered,
    Answers,
    maker,
    message_of,
    questions,
    share,
    state_of,
)
from replay_pipeline.replay import ledger_status
from replay_pipeline.testing import TeacherServer

HERE = Path(__file__).parent
PLAN = tomllib.loads((HERE / "plan.toml").read_text("utf-8"))
WEIGHTS = HERE.parents[1] / "build/real-model/smollm2-135m-instruct"
N_BOOT = 4000
ROWS_A_STEP = 4
LEAST_BETTER = 0.05
"""By so much must what is imitated be right more often than the agent's own answers."""
MOST_WRITTEN = 192
"""Tokens of an answer."""
Labels = dict[str, dict[str, Any]]
"""What is imitated, by question."""


def the_product(table: Path, words: Sequence[str]) -> None:
    """Run a command of the product as one that has learned what differences mean from other models."""
    from replay_pipeline import cli
    from replay_pipeline.judge import belief

    belief.TABLE = table
    sys.argv = ["replay-pipeline", *words]
    cli.main()


class World:
    """The questions of one run, and everybody's answers."""

    def __init__(
        self, out: Path, answers: Path, asked: Path, model: Path, size: str, seed: int
    ) -> None:
        """Split the questions; `seed` is the draw."""
        self.out, self.model, self.size = out, model, PLAN["sizes"][size]
        self.answers, self.asked, self.seed = Answers(answers), questions(asked), seed
        self.right = bench.right_answers(asked)
        out.mkdir(parents=True, exist_ok=True)
        wheel = fetch(*bench.WHEEL, out / "wheels")
        self.check = bench.Check(wheel, self.asked, self.right)
        identity = json.dumps([size, seed, model.name, self.answers.folder.name])
        if (as_kept := out / "run.json").exists() and as_kept.read_text("utf-8") != identity:
            raise SystemExit(f"{out}: another run is there; name another folder")
        as_kept.write_text(identity, "utf-8")
        self.splits = kept(out / "splits.json", self._splits)

    @cached_property
    def renderer(self) -> Any:
        """Return what renders prompts as the trainer does."""
        import yaml
        from transformers import AutoTokenizer

        from trainer.data.rendering import Renderer

        limits = yaml.safe_load((HERE / "train.yaml").read_text("utf-8"))["trl"]
        names = ("max_prompt_tokens", "max_response_tokens")
        tokenizer: Any = AutoTokenizer.from_pretrained(self.model, padding_side="left")
        return Renderer(tokenizer=tokenizer, **{name: limits[name] for name in names})

    def prompt(self, key: str) -> tuple[Any, Any]:
        """Return messages and tools of a question."""
        state = state_of(key, self.asked[key], "", Answered([], "", is_right=True))
        return [{"role": "system", "content": bench.SYSTEM}, *state["messages"]], state.get("tools")

    def perfect(self, key: str) -> dict[str, Any]:
        """Return a right answer."""
        return message_of(Answered(bench.first_right(self.right[key]), "", is_right=True))

    def coins(self, keys: Sequence[str]) -> Labels:
        """Return answers of any model, by a coin such as were scored right or wrong."""
        models = {model: self.answers.of(model) for model in self.answers.readable()}
        draw, found = random.Random(self.seed), {}
        for key in keys:
            if (answer := bench.coin(key, models, draw)) is not None:
                found[key] = message_of(answer)
        return found

    def _splits(self) -> dict[str, list[str]]:
        renderer, draw = self.renderer, random.Random(self.seed)
        keys = sorted(self.asked)
        draw.shuffle(keys)
        found: dict[str, list[str]] = {}
        for split in ("form", "train", "test"):
            wanted, taken = dict(self.size[split]), found.setdefault(split, [])
            for key in [key for key in keys if wanted.get(bench.category_of(key))]:
                if not wanted[bench.category_of(key)] or not self._fits(renderer, key):
                    continue
                wanted[bench.category_of(key)] -= 1
                taken.append(key)
            keys = [key for key in keys if key not in set(taken)]
        return found

    def _fits(self, renderer: Any, key: str) -> bool:
        """Return whether a question fits whole, and its right answer is right."""
        _, cut = renderer.prompt(*self.prompt(key))
        return not (cut.refusal or cut.n_dropped_tokens) and self.check(key, self.perfect(key))


def teacher_lines(base_url: str, models: Sequence[str], more: Mapping[str, Any]) -> str:
    """Return the settings file for teachers at an address."""
    tables = [("", PLAN["pipeline"] | more)]
    for model in models:
        name = {"name": model, "model": bench.named(model), "base_url": base_url}
        tables.append(("[[replay.teachers]]", PLAN["asked"] | name))
    return "\n".join(
        line
        for head, of in tables
        for line in (head, *(f"{key} = {json.dumps(value)}" for key, value in of.items()))
    )


class Buying:
    """One agent, its teachers, and what they make of the questions to train on."""

    def __init__(self, world: World, of: Mapping[str, Any]) -> None:
        """Name the models of a set."""
        self.world, self.agent, self.teachers = world, of["agent"], list(of["teachers"])
        self.folder = world.out / of["name"].replace(" ", "-")
        said = world.answers.of(self.agent)
        self.keys = [key for key in world.splits["train"] if said[key].calls is not None]

    @cached_property
    def table(self) -> Path:
        """Return what differences mean, learned without the makers of all four models."""
        from benchmarks.real_models import drawn, learned_from

        path, answers = self.folder / "belief.toml", self.world.answers
        if not path.exists():
            without = {maker(model) for model in (self.agent, *self.teachers)}
            size = self.world.size["calibration"]
            draws = drawn(answers, self.world.asked, seed=self.world.seed, without=without, **size)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(learned_from(draws, answers.folder.name, n_again=1), "utf-8")
        return path

    @property
    def dataset(self) -> Path:
        """Return what the product published."""
        return self.folder / "shipped" / "data" / "dataset"

    @cached_property
    def bought(self) -> dict[str, Any]:
        """Return what the first teacher costs at all questions, and what the product buys for the same dollars."""

        def make() -> dict[str, Any]:
            one = self.buy("one", self.teachers[:1], 1000.0)
            usd = ledger_status(one / "ledger.sqlite").spent_usd
            data = self.buy("shipped", self.teachers, usd, "pairs", "normalize", "publish")
            found = {"one teacher": self.worth_of_one(), "as shipped": self.worth(data)}
            for each in found.values():
                each["right a dollar"] = round(each["right"] / usd)
            return {"usd": usd, "questions": len(self.keys)} | found

        return kept(self.folder / "bought.json", make)

    def buy(self, name: str, models: Sequence[str], usd: float, *steps: str) -> Path:
        """Ask teachers at the sessions for so many dollars, and go on by these commands; give the data."""
        folder, answers = self.folder / name, self.world.answers
        shutil.rmtree(folder, ignore_errors=True)
        own = answers.of(self.agent)
        bench.write_sessions(folder / "sessions", self.world.asked, self.keys, self.agent, own)
        run = [sys.executable, Path(__file__), "--product", self.table]
        where = ("--data", folder / "data", "--settings", folder / "settings.toml")
        log = folder / "log.txt"
        self.write_settings(folder, "http://127.0.0.1:9", models)
        command(*run, "ingest", folder / "sessions", *where, log=log)
        states = rows_of(folder / "data" / "states", ["state_id", "session_id"])
        said = {
            row["state_id"]: {
                bench.named(model): message_of(answer)
                for model in models
                if (answer := answers.of(model).get(row["session_id"])) and answer.calls is not None
            }
            for row in states
        }
        prices = {bench.named(model): PRICES[model] for model in models}
        with TeacherServer(said, prices=prices) as server:
            self.write_settings(folder, server.base_url, models)
            command(*run, "replay", "--budget", str(usd), "--yes", *where, log=log)
        for step in steps:
            command(*run, step, *where, log=log)
        return folder / "data"

    def write_settings(self, folder: Path, base_url: str, models: Sequence[str]) -> None:
        """Write the settings of a purchase. One teacher needs no second one to agree with."""
        more: dict[str, Any] = {"replay.accepted_terms": list(map(bench.named, models))}
        if len(models) == 1:
            more |= {"replay.gates": [], "pairs.agreement_threshold": 1}
        text = teacher_lines(base_url, models, more)
        (folder / "settings.toml").write_text(text + "\n", "utf-8")

    def worth_of_one(self) -> dict[str, Any]:
        """Return how many answers the first teacher gave, and how many are right."""
        marks = [self.world.check(key, said) for key, said in self.labels("teacher").items()]
        return {"answers": len(marks), "right": sum(marks)}

    def worth(self, data: Path) -> dict[str, Any]:
        """Return what a dataset holds, claimed and true, and how many actions to imitate are right."""
        check, agent = self.world.check, self.labels("agent")
        spent, all_right = ledger_status(data / "ledger.sqlite"), 0
        found: dict[str, Any] = {"calls": sum(spent.calls.values())}
        folder = self.dataset / "data"
        lessons = [row for name in ("positives", "answers") for row in rows_of(folder / name)]
        pairs = rows_of(self.dataset / "data" / "pairs")
        for kind in ("agreement", "lesson", "answer", "pair"):
            side, claim = ("chosen", "p_better") if kind == "pair" else ("completion", "p_chosen_right")  # fmt: skip
            some = pairs if kind == "pair" else [row for row in lessons if row["kind"] == kind]
            right = [check(row["session_id"], row[side][0]) for row in some]
            all_right += sum(right)
            if kind == "pair":
                sides = zip(right, (row["session_id"] for row in some), strict=True)
                right = [is_right and not check(key, agent[key]) for is_right, key in sides]
            claimed = share(row[claim] for row in some)
            found[kind] = {"n": len(some), "claimed": claimed, "true": share(right)}
        outcomes = Counter(row["outcome"] for row in rows_of(data / "outcomes", ["outcome"]))
        return found | {"right": all_right, "outcomes": dict(outcomes.most_common())}

    def labels(self, whose: str) -> Labels:
        """Return what an arm imitates, by question. See `plan.toml`."""
        world, first = self.world, self.teachers[0]
        if whose == "right":
            return {key: world.perfect(key) for key in self.keys}
        if whose == "coin":
            return world.coins(self.keys)
        if whose == "foreign":
            others = [*self.keys[1:], *self.keys[:1]]
            return {key: world.perfect(other) for key, other in zip(self.keys, others, strict=True)}
        if whose == "published":
            folder = self.dataset / "data"
            return {
                row["session_id"]: row[side][0]
                for name, side in (
                    ("answers", "completion"),
                    ("positives", "completion"),
                    ("pairs", "chosen"),
                )
                for row in rows_of(folder / name)
            }
        said = world.answers.of(self.agent if whose == "agent" else first)
        return {
            key: message_of(said[key])
            for key in self.keys
            if key in said and said[key].calls is not None
        }


def rows_of(folder: Path, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return the rows of all files of a table."""
    files = sorted(folder.rglob("*.parquet"))
    return [row for file in files for row in pq.read_table(file, columns=columns).to_pylist()]


_CARD = """---
configs:
- config_name: positives
  data_files:
  - split: train
    path: positives.parquet
---
"""


def write_dataset(folder: Path, world: World, labels: Labels) -> Path:
    """Write actions to imitate as the config `positives` of a dataset."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for key, action in labels.items():
        messages, tools = world.prompt(key)
        action = {**action, "content": action.get("content") or ""}
        rows.append({"prompt": messages, "completion": [action], "tools": json.dumps(tools), "session_id": key})  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), folder / "positives.parquet")
    (folder / "README.md").write_text(_CARD, "utf-8")
    return folder


class Arms:
    """Trains a model on what was bought, and tests it on questions that nobody bought answers to."""

    def __init__(self, world: World) -> None:
        """Take the questions and the model of a run."""
        self.world = world

    def trainee(self) -> Path:
        """Teach the model the form of a call, by right answers to other questions."""
        world, folder = self.world, self.world.out / "form"

        def make() -> str:
            labels = {key: world.perfect(key) for key in world.splits["form"]}
            data = write_dataset(folder / "dataset", world, labels)
            size = world.size
            return str(self.train(world.model, data, folder / "out", len(labels), size["form_epochs"], 0))  # fmt: skip

        return Path(kept(folder / "form.json", make))

    def train(
        self, model: Path, data: Path, out: Path, n_rows: int, epochs: float, seed: int,
        more: Mapping[str, Any] | None = None,
    ) -> Path:  # fmt: skip
        """Train so many epochs by `replay-train`, with `more` settings; give the checkpoint."""
        values = {"model": model, "dataset": data, "output": out, "trl.seed": seed,
                  "trl.max_steps": math.ceil(epochs * n_rows / ROWS_A_STEP)} | (more or {})  # fmt: skip
        sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        command(sys.executable, "-m", "trainer", "--config", HERE / "train.yaml", *sets, log=out.with_suffix(".log"))  # fmt: skip
        return out / "checkpoint"

    def act(self, model: Path) -> dict[str, dict[str, Any]]:
        """Return what a model answers to the questions to test on, greedily."""
        import torch
        from transformers import AutoModelForCausalLM

        from trainer.data.acting import greedy_ids
        from trainer.data.rewards import parse_action

        renderer, keys = self.world.renderer, self.world.splits["test"]
        policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        ids = [renderer.prompt_ids(*self.world.prompt(key)) for key in keys]
        written = greedy_ids(policy, renderer.tokenizer, ids, max_new_tokens=MOST_WRITTEN)
        decode = renderer.tokenizer.decode
        return {key: parse_action(decode(each, skip_special_tokens=True)) for key, each in zip(keys, written, strict=True)}  # fmt: skip

    def run(self, buying: Buying, arm: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Train one arm by one seed, and test it."""
        name = "nothing" if "labels" not in arm else f"{buying.folder.name}, {arm['name']}, {seed}"
        folder = self.world.out / "arms" / name

        def make() -> dict[str, Any]:
            world, model = self.world, self.trainee()
            labels = buying.labels(arm["labels"]) if "labels" in arm else {}
            agent = buying.labels("agent")
            if labels:
                is_published = arm["labels"] == "published"
                data = (
                    buying.dataset
                    if is_published
                    else write_dataset(folder / "dataset", world, labels)
                )
                epochs, more = world.size["epochs"], arm.get("settings")
                model = self.train(model, data, folder / "out", len(labels), epochs, seed, more)
            said = self.act(model)
            shutil.rmtree(folder, ignore_errors=True)  # what it answered is what counts
            return {
                "rows": len(labels),
                "labels right": share(world.check(key, label) for key, label in labels.items()),
                "agent right there": share(world.check(key, agent[key]) for key in labels),
                "right": {key: world.check(key, message) for key, message in said.items()},
                "calls": share(bool(message.get("tool_calls")) for message in said.values()),
            }

        return kept(folder.with_suffix(".json"), make)


def intervals(arms: Mapping[str, Sequence[Mapping[str, bool]]]) -> dict[str, np.ndarray]:
    """Draw questions and seeds with replacement; return the share of right answers of each draw, by arm."""
    chance, drawn = np.random.default_rng(0), {}
    n_questions = len(next(iter(arms.values()))[0])
    weights_BN = chance.multinomial(n_questions, np.full(n_questions, 1 / n_questions), size=N_BOOT)
    for name, seeds in arms.items():
        right_SN = np.array([list(each.values()) for each in seeds], float)
        n = len(right_SN)
        weights_BS = chance.multinomial(n, np.full(n, 1 / n), size=N_BOOT)
        drawn[name] = ((weights_BS / n) @ right_SN * weights_BN).sum(1) / n_questions
    return drawn


def check(arm: Mapping[str, Any], gain: float) -> list[str]:
    """Say what is wrong with an arm that gains at least so much over no training."""
    found = []
    if not arm["rows"]:
        found.append("nothing is imitated")
    elif arm["labels right"] - arm["agent right there"] < LEAST_BETTER:
        found.append("what is imitated is right no more often than the agent")
    if gain <= 0:
        found.append("it answers no better than without training")
    return found


def table_of(arms: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return each arm's share of right answers with its interval, and what it is ahead of one teacher."""
    drawn = intervals({name: [each["right"] for each in some] for name, some in arms.items()})
    rows = {}
    for name, some in arms.items():
        ahead = drawn[name] - drawn.get("one teacher", drawn["nothing"])
        gain = np.quantile(drawn[name] - drawn["nothing"], 0.025)
        by_category: dict[str, list[bool]] = defaultdict(list)
        for each in some:
            for key, is_right in each["right"].items():
                by_category[bench.category_of(key)].append(is_right)
        rows[name] = {
            "seeds": len(some),
            **{key: some[0][key] for key in ("rows", "labels right", "agent right there")},
            "check": check(some[0], gain),
            "right": share(is_right for each in some for is_right in each["right"].values()),
            "interval": np.quantile(drawn[name], [0.025, 0.975]).round(3).tolist(),
            "ahead of one teacher": np.quantile(ahead, [0.025, 0.5, 0.975]).round(3).tolist(),
            "calls a tool": share(each["calls"] for each in some),
            "by category": {category: share(of) for category, of in by_category.items()},
        }
    return rows


def main() -> None:
    """Buy, show what was bought, train, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--answers", type=Path, required=True, help="checkout of HuanzhiMao/BFCL-Result"
    )
    parser.add_argument(
        "--questions", type=Path, required=True, help="checkout of ShishirPatil/gorilla"
    )
    parser.add_argument("--size", default="full", choices=PLAN["sizes"])
    parser.add_argument("--model", type=Path, default=WEIGHTS)
    parser.add_argument("--sets", nargs="+", choices=[each["name"] for each in PLAN["sets"]])
    parser.add_argument("--arms", nargs="*", help="of plan.toml; without a name none is trained")
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--draw", type=int, default=0, help="seed of the questions of each split")
    given = parser.parse_args()
    world = World(given.folder, given.answers, given.questions, given.model, given.size, given.draw)
    size = PLAN["sizes"][given.size]
    sets = [each for each in PLAN["sets"] if each["name"] in (given.sets or size["sets"])]
    arms = [arm for arm in PLAN["arms"] if given.arms is None or arm["name"] in given.arms]
    found: dict[str, Any] = {"snapshot": world.answers.folder.name, "sets": {}}
    for of in sets:
        bought = Buying(world, of).bought
        found["sets"][of["name"]] = {
            "agent": of["agent"],
            "teachers": of["teachers"],
            "bought": bought,
        }
        print(json.dumps({of["name"]: bought}, indent=1), flush=True)
    for of in sets if arms else ():
        done: dict[str, list[Any]] = defaultdict(list)
        for seed, arm in product(given.seeds or size["seeds"], arms):
            if "labels" in arm or not done[arm["name"]]:
                done[arm["name"]].append(Arms(world).run(Buying(world, of), arm, seed))
            found["sets"][of["name"]]["arms"] = table_of(done)
            (given.folder / "table.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        for name, row in found["sets"][of["name"]]["arms"].items():
            told = "; ".join(row["check"]) or "passes"
            print(
                f"{of['name']:22} {name:28} {row['right']} {row['interval']} {row['rows']} rows: {told}"
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--product"]:
        the_product(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
