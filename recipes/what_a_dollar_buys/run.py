"""What a dollar buys: sessions, teachers, lessons and models by the product's own commands, and what the models do.

    python recipes/what_a_dollar_buys/run.py build/dollar --size quick

Each part is kept in the folder as soon as it is whole, and a second call goes on from there.
"""

import argparse
import json
import random
import shutil
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import table
import torch
from parts import command, kept
from tasks import (
    N_STEPS,
    At,
    Message,
    Repository,
    bare,
    call,
    repositories,
    scripted_answers,
    states_of,
    write_sessions,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from replay_pipeline.actions import agreement_level, canonical_action
from replay_pipeline.replay import ledger_status
from replay_pipeline.testing import TeacherServer
from trainer.__main__ import PRETRAINED_CONFIG
from trainer.data.acting import greedy_ids
from trainer.data.dataset import load_preference_data
from trainer.data.rendering import Renderer
from trainer.data.rewards import parse_action

HERE = Path(__file__).parent
PLAN = tomllib.loads((HERE / "arms.toml").read_text("utf-8"))
WEIGHTS = HERE.parents[1] / "build/real-model/smollm2-135m-instruct"
TRAINER = (sys.executable, "-m", "trainer")
PRODUCT = Path(sys.executable).with_name("replay-pipeline")
PER_STEP = 4
N_SAMPLES = 3
NEW_TOKENS = 96

Said = tuple[At, Message]
Lesson = tuple[list[Message], Message, Message | None]
"""A prompt, the action to take there, and one that is not to be taken."""


def train(model: Path, dataset: Path, output: Path, settings: Mapping[str, Any]) -> Path:
    """Train by `replay-train` with its own settings for pretrained models; give the checkpoint."""
    measured = {"evaluation.max_pairs": 0, "evaluation.max_prompts": 0}  # it is measured here
    values = {"model": model, "dataset": dataset, "output": output, **measured, **settings}
    sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    command(*TRAINER, "--config", PRETRAINED_CONFIG, *sets, log=output.with_suffix(".log"))
    return output / "checkpoint"


def write_dataset(folder: Path, lessons: Sequence[Lesson]) -> Path:
    """Write lessons, and pairs of those with a second action, as a dataset that the trainer reads."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[Any]] = {"positives": [], "pairs": []}
    for number, (prompt, action, rejected) in enumerate(lessons):
        row = {"prompt": json.dumps(prompt), "session_id": str(number)}
        if rejected is None:
            rows["positives"].append(row | {"completion": json.dumps([action])})
        else:
            sides = {"chosen": json.dumps([action]), "rejected": json.dumps([rejected])}
            rows["pairs"].append(row | sides)
    card = ["---", "configs:"]
    for name in (name for name, of in rows.items() if of):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows[name])) + "\n")
        card += [f"- config_name: {name}", "  data_files:"]
        card += ["  - split: train", f"    path: {name}.jsonl"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]), "utf-8")
    return folder


class Policy:
    """A checkpoint that acts in repositories, with the trainer's own rendering."""

    def __init__(self, model: Path, rules: str = "") -> None:
        """Load it; `rules` go behind the system prompt."""
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        sizes = {"max_prompt_tokens": 512, "max_response_tokens": 256}
        self.renderer = Renderer(tokenizer=self.tokenizer, **sizes, with_tools=False)
        self.rules = rules

    def act(self, asked: Sequence[Repository]) -> list[list[Message]]:
        """Return the greedy actions in each repository, until the task is over."""
        done: list[list[Message]] = [[] for _ in asked]
        for _ in range(N_STEPS):
            going = [i for i, one in enumerate(asked)
                     if not done[i] or one.run(*done[i])[0] in ("open", "refused")]  # fmt: skip
            prompts = [asked[i].after(done[i]) for i in going]
            for prompt in prompts:
                prompt[0] = {"role": "system", "content": prompt[0]["content"] + self.rules}
            ids = [self.renderer.prompt_ids(prompt) for prompt in prompts]
            written = greedy_ids(self.model, self.tokenizer, ids, max_new_tokens=NEW_TOKENS)
            for i, each in zip(going, written, strict=True):
                text = self.tokenizer.decode(each, skip_special_tokens=True)
                done[i].append(as_taken(parse_action(text)))
        return done

    def samples(self, prompts: Sequence[list[Message]]) -> list[list[Message]]:
        """Draw `N_SAMPLES` actions at each prompt, at temperature 1."""
        torch.manual_seed(0)
        found = []
        for prompt in prompts:
            ids = torch.tensor([self.renderer.prompt_ids(prompt)])
            written = self.model.generate(
                ids, do_sample=True, temperature=1.0, top_k=0, num_return_sequences=N_SAMPLES,
                max_new_tokens=NEW_TOKENS, pad_token_id=self.tokenizer.pad_token_id,
            )[:, ids.size(1) :]  # fmt: skip
            texts = self.tokenizer.batch_decode(written, skip_special_tokens=True)
            found.append([as_taken(parse_action(text)) for text in texts])
        return found


def as_taken(message: Message) -> Message:
    """Return an action as a client takes it: one call with named arguments, or a text."""
    for made in message.get("tool_calls") or ():
        name, given = bare({"tool_calls": [made]})
        if isinstance(name, str):
            return call(name, **{str(key): str(value) for key, value in given.items()})
    return {"role": "assistant", "content": message.get("content") or "..."}


def is_same(one: Message, other: Message) -> bool:
    """Say whether two actions are the same to the product."""
    level = agreement_level(canonical_action(one), canonical_action(other))
    return level in ("exact", "effect")


def chain(folder: Path, *commands: Sequence[str | Path]) -> None:
    """Run commands of the product, one after another, on the data and the settings of a folder."""
    where = ("--data", folder / "data", "--settings", folder / "settings.toml")
    for words in commands:
        command(PRODUCT, *words, *where, log=folder / "log.txt")


def buy(
    folder: Path, sessions: Path, address: str, *, usd: float, teacher: int | None = None
) -> None:
    """Take sessions to a dataset as shipped, or to the answers of one teacher alone."""
    tables = [("", PLAN["pipeline"] | ({} if teacher is None else {"replay.gates": []}))]
    for number, of in enumerate(PLAN["teachers"]):
        if teacher in (None, number):
            own = {"base_url": address, "dialect": "openrouter", "max_concurrency": 2}
            tables += [("[[replay.teachers]]", PLAN["asked"] | of | own)]
    lines = [line for head, of in tables
             for line in (head, *(f"{key} = {json.dumps(value)}" for key, value in of.items()))]  # fmt: skip
    shutil.rmtree(folder / "data", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.toml").write_text("\n".join(lines) + "\n", "utf-8")
    chain(folder, ("ingest", sessions), ("replay", "--budget", str(usd), "--yes"))
    if teacher is None:
        chain(folder, ("pairs",), ("normalize",), ("publish",))


def rows_of(data: Path, name: str) -> list[dict[str, Any]]:
    """Read a table of the product."""
    files = sorted((data / name).rglob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def message_of(row: Mapping[str, Any]) -> Message | None:
    """Return a teacher's answer, or None if there is none."""
    if row["action_text"] is None:
        return None
    calls = json.loads(row["action_tool_calls_json"] or "[]")
    message = {"role": "assistant", "content": row["action_text"]}
    return as_taken(message | ({"tool_calls": calls} if calls else {}))


def lessons_of(said: Sequence[Said], rejected: Sequence[Message | None] = ()) -> list[Lesson]:
    """Return lessons as rows of a dataset."""
    sides = rejected or [None] * len(said)
    return [(at.messages, action, side) for (at, action), side in zip(said, sides, strict=True)]


def rules_of(said: Sequence[Said]) -> str:
    """Write a rule for each family: a request, and what was right there."""
    rules = {at.one.family: f"- {at.one.text.splitlines()[-1]} -> {canonical_action(action).render()}"
             for at, action in said if not at.before}  # fmt: skip
    return "\nFor example:\n" + "\n".join(rules.values())


def scripted(asked: Sequence[Repository], right: float) -> list[list[Message]]:
    """Let a scripted agent act: right at this rate, and wrong in its own ways."""
    done = []
    for one in asked:
        draw, before = random.Random(f"agent {one.id}"), list[Message]()
        while len(before) < N_STEPS and (not before or one.run(*before)[0] in ("open", "refused")):
            how = one.right_action if draw.random() < right else one.wrong_action
            before.append(how(draw, before))
        done.append(before)
    return done


@dataclass(frozen=True)
class Recorded:
    """Sessions in a folder, and the repositories that they were recorded in."""

    folder: Path
    asked: list[Repository]

    @cached_property
    def states(self) -> dict[str, At]:
        """The recorded states by id."""
        return states_of(self.folder, self.asked)

    @cached_property
    def right(self) -> float:
        """How often the agent is right."""
        return sum(at.is_good(at.did) for at in self.states.values()) / len(self.states)

    def part(self, folder: Path, number: int, n: int) -> "Recorded":
        """Copy every n-th session, from that `number`, into a folder."""
        asked = self.asked[number::n]
        folder.mkdir(parents=True, exist_ok=True)
        for one in asked:
            shutil.copy(self.folder / f"{one.id}.jsonl", folder)
        return Recorded(folder, asked)


class Work:
    """The parts of one run in its folder; each is made once."""

    def __init__(self, out: Path, model: Path, size: Mapping[str, Any], draw: int) -> None:
        """Draw the repositories; `draw` is their seed."""
        self.out, self.model, self.size = out, model, size
        drawn = {name: size[name] for name in ("n_form", "n_train", "n_test")}
        self.repositories = repositories(**drawn, seed=draw)
        out.mkdir(parents=True, exist_ok=True)
        identity = json.dumps({"draw": draw, "model": model.name, "size": size})
        if (kept_as := out / "run.json").exists() and kept_as.read_text("utf-8") != identity:
            raise SystemExit(f"{out}: another run is there; name another folder")
        kept_as.write_text(identity, "utf-8")

    def of(self, *splits: str) -> list[Repository]:
        """Return the repositories of these splits."""
        return [one for one in self.repositories if one.split in splits]

    def agent(self) -> Path:
        """Teach the model to call tools, on other tasks; it becomes the agent, and then the trainee."""

        def make() -> str:
            draw, lessons = random.Random(0), []
            for one in self.of("form"):
                before: list[Message] = []
                while len(before) < N_STEPS and (not before or one.run(*before)[0] == "open"):
                    action = one.right_action(draw, before)
                    lessons.append((one.after(before), action, None))
                    before.append(action)
            data = write_dataset(self.out / "agent" / "dataset", lessons)
            settings = PLAN["settings"]["imitate"] | {"trl.max_steps": self.size["form_steps"]}
            return str(train(self.model, data, self.out / "agent" / "model", settings))

        return Path(kept(self.out / "agent.json", make))

    def sessions(self, regime: str) -> Recorded:
        """Record the agent in the repositories to train on."""
        right = PLAN["regimes"][regime].get("agent_right")
        folder = self.out / ("sessions" if right is None else f"sessions, {regime}")

        def make() -> str:
            asked = self.of("train")
            done = Policy(self.agent()).act(asked) if right is None else scripted(asked, right)
            return str(write_sessions(folder, asked, done))

        return Recorded(Path(kept(self.out / f"{folder.name}.json", make)), self.of("train"))

    def published(self, regime: str) -> tuple[Path, list[Said], dict[str, Any]]:
        """Buy as shipped; give the dataset, its lessons, and what they cost."""
        folder, recorded = self.out / "bought" / f"{regime}, shipped", self.sessions(regime)
        make = partial(
            self._bought, folder, recorded, regime, recorded.right, self.size["usd"], None
        )
        spent, said = kept(folder / "spent.json", make), []
        for name, column in (("positives", "action_json"), ("dpo_pairs", "chosen_action_json")):
            said += [(recorded.states[row["state_id"]], json.loads(row[column]))
                     for row in rows_of(folder / "data", name)]  # fmt: skip
        return folder / "data" / "dataset", said, spent

    def answers(
        self, arm: Mapping[str, Any], regime: str, recorded: Recorded, name: str, usd: float
    ) -> tuple[list[Said], dict[str, Any]]:
        """Ask teachers, each at its part of the repositories; give all that they said, and what it cost."""
        regime, (_, agent) = arm.get("regime", regime), (None, self.sessions(regime).right)
        teachers, said, spent = arm["teachers"], list[Said](), Counter[str]()
        for part, teacher in enumerate(teachers):
            folder = self.out / "bought" / f"{name}, {regime}, {part} of {len(teachers)}"
            mine = recorded.part(folder / "sessions", part, len(teachers))
            usd_each = round(usd / len(teachers), 6)
            make = partial(self._bought, folder, mine, regime, agent, usd_each, teacher)
            spent.update(kept(folder / "spent.json", make))
            for row in rows_of(folder / "data", "teacher_actions"):
                action = message_of(row)
                if action is not None:
                    said.append((mine.states[row["state_id"]], action))
        return said, dict(spent)

    def _bought(
        self, folder: Path, recorded: Recorded, regime: str, agent: float, usd: float,
        teacher: int | None,
    ) -> dict[str, Any]:  # fmt: skip
        models, of = [each["model"] for each in PLAN["teachers"]], PLAN["regimes"][regime]
        said = scripted_answers(recorded.states, models, of, agent=agent)
        with TeacherServer(said) as server:
            buy(folder, recorded.folder, server.base_url, usd=usd, teacher=teacher)
        status = ledger_status(folder / "data" / "ledger.sqlite")
        return {"n_calls": sum(status.calls.values()), "usd": status.spent_usd}

    def samples(self, regime: str) -> dict[str, list[Message]]:
        """Let the agent act again at the recorded states, by chance."""
        states = self.sessions(regime).states

        def make() -> dict[str, list[Message]]:
            drawn = Policy(self.agent()).samples([at.messages for at in states.values()])
            return dict(zip(states, drawn, strict=True))

        return kept(self.out / f"samples, {regime}.json", make)

    def lessons(
        self, arm: Mapping[str, Any], regime: str, folder: Path, model: Path, number: int
    ) -> tuple[Path, list[Said], dict[str, Any]]:
        """Make the dataset of an arm, of its round `number`; give also its lessons, and what they cost."""
        if arm["lessons"] in ("published", "contrast", "rules"):
            dataset, said, spent = self.published(regime)
            if arm["lessons"] != "contrast":
                return dataset, said, spent
            drawn = self.samples(regime)
            rejected = [next((one for one in drawn[at.state_id] if not is_same(one, action)), None)
                        for at, action in said]  # fmt: skip
            return write_dataset(folder / "dataset", lessons_of(said, rejected)), said, spent
        recorded, name, usd = self.sessions(regime), "answers", self.size["usd"]
        if arm["lessons"] == "votes":
            said, drawn = [], self.samples(regime)
            for state_id, at in recorded.states.items():
                votes = [
                    sum(is_same(one, each) for each in drawn[state_id]) for one in drawn[state_id]
                ]
                if 2 * max(votes) > N_SAMPLES:
                    said.append((at, drawn[state_id][votes.index(max(votes))]))
            return (
                write_dataset(folder / "dataset", lessons_of(said)),
                said,
                {"n_calls": 0, "usd": 0.0},
            )
        if n_rounds := arm.get("rounds"):
            # At the first states the agent acted; at later ones the model acts that was trained on them.
            recorded = recorded.part(folder / f"recorded-{number}", number, n_rounds)
            if number:
                done = Policy(model).act(recorded.asked)
                recorded = Recorded(
                    write_sessions(folder / f"own-{number}", recorded.asked, done), recorded.asked
                )
            name, usd = f"{folder.name}, round {number}", usd / n_rounds
        said, spent = self.answers(arm, regime, recorded, name, usd)
        return write_dataset(folder / f"dataset-{number}", lessons_of(said)), said, spent

    def steps(self, regime: str) -> int:
        """Return the steps of all arms where these are the same: those of one teacher by epochs."""
        [one] = [arm for arm in PLAN["arms"] if arm["name"] == "one teacher"]
        said, _ = self.answers(one, regime, self.sessions(regime), "answers", self.size["usd"])
        return self.by_epochs(len(said))

    def by_epochs(self, n_rows: int) -> int:
        """Return the steps that so many rows take by the epochs of all arms."""
        return -(-self.size["epochs"] * n_rows // PER_STEP)

    def arm(self, regime: str, arm: Mapping[str, Any], seed: int, by: str) -> dict[str, Any]:
        """Train one arm by one seed, for so many epochs or steps, and see what it does in the tests."""
        name = f"{regime}, {arm['name']}, {by}, {seed}"
        make = partial(self._arm, regime, arm, seed, by, self.out / "arms" / name)
        return kept(self.out / "arms" / f"{name}.json", make)

    def _arm(
        self, regime: str, arm: Mapping[str, Any], seed: int, by: str, folder: Path
    ) -> dict[str, Any]:
        model, rules, n_steps = self.agent(), "", 0
        said, spent, agent_right = list[Said](), Counter[str](), None
        for number in range(arm.get("rounds", 1) if "lessons" in arm else 0):
            dataset, more, cost = self.lessons(arm, regime, folder, model, number)
            said += more
            spent.update(cost)
            if arm["lessons"] == "rules":
                rules = rules_of(more)
                continue
            n_rows = len(load_preference_data(dataset).sft_pairs("answers")) if more else 0
            steps = (
                self.by_epochs(n_rows)
                if by == "epochs"
                else self.steps(regime) // arm.get("rounds", 1)
            )
            settings = {"trl.max_steps": steps, "trl.seed": seed} | PLAN["settings"][
                arm["settings"]
            ]
            if n_rows:
                model = train(model, dataset, folder / f"round-{number}", settings)
                n_steps += settings["trl.max_steps"]
        if said:
            agent_right = sum(at.is_good(at.did) for at, _ in said) / len(said)
        tested = self.of("new_names", "new_words")
        acts = Policy(model, rules).act(tested)
        outcomes = [[one.id, one.family, one.kind, one.split, one.run(*done)[0], len(done)]
                    for one, done in zip(tested, acts, strict=True)]  # fmt: skip
        shutil.rmtree(
            folder, ignore_errors=True
        )  # weights of half a gigabyte; what they did counts
        return {
            "outcomes": outcomes, "steps": n_steps, **spent, "n_lessons": len(said), "agent_right": agent_right,
            "right": sum(at.is_good(action) for at, action in said) / len(said) if said else None,
        }  # fmt: skip


def main() -> int:
    """Run what is asked for, and write the table; 1 if a control passes the check that it must fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", default="full", choices=PLAN["sizes"])
    parser.add_argument("--model", type=Path, default=WEIGHTS)
    parser.add_argument("--regimes", nargs="+", choices=PLAN["regimes"], default=[table.REGIME])
    parser.add_argument("--arms", nargs="*", help="of arms.toml; without a name none")
    parser.add_argument("--by", nargs="+", choices=("epochs", "steps"), default=["epochs"])
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--draw", type=int, default=0, help="seed of repositories and requests")
    options = parser.parse_args()
    is_quick = options.size == "quick"
    work = Work(options.folder, options.model, PLAN["sizes"][options.size], options.draw)
    seeds = options.seeds or ([0] if is_quick else [0, 1, 2, 3, 4])
    for seed, by, regime, arm in product(seeds, options.by, options.regimes, PLAN["arms"]):
        asked = arm["name"] in options.arms if options.arms is not None else (
            "is_quick" in arm or not is_quick
        )  # fmt: skip
        # Further seeds are for the named comparison; the arms of both tables that see the same are one.
        is_same = by == "steps" and table.is_same_by_steps(arm)
        if asked and not is_same and (seed == seeds[0] or "by_seeds" in arm):
            work.arm(regime, arm, seed, by)
            table.write(options.folder)
    return table.report(table.write(options.folder))


if __name__ == "__main__":
    sys.exit(main())
