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
import rewards
import table
from tasks import Repository, repositories, write_session

from replay_pipeline import ClaudeCodeIngester, Pipeline, Settings
from replay_pipeline.replay import ledger_status
from replay_pipeline.testing import TeacherServer

HERE = Path(__file__).parent
PLAN = tomllib.loads((HERE / "arms.toml").read_text("utf-8"))
AGENT = 0.45  # how often a scripted agent is right
WEIGHTS = HERE.parents[1] / "build/real-model/smollm2-135m-instruct"
TRAINER = (sys.executable, "-m", "trainer")
PRODUCT = Path(sys.executable).with_name("replay-pipeline")
CHAIN = ("pairs", "normalize", "publish")
Message = dict[str, Any]


def command(*words: str | Path, log: Path) -> None:
    """Run a command of the product; what it says goes to a log.

    Raises:
        SystemExit: it failed.
    """
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
    """Train by `python -m trainer`; give the checkpoint."""
    values = {"model": model, "dataset": dataset, "output": output, **settings}
    sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    config = ("--config", HERE / "train.yaml")
    command(*TRAINER, *config, *sets, log=output.with_suffix(".log"))
    return output / "checkpoint"


def loaded(model: Path) -> Any:
    """Load a checkpoint that acts in repositories."""
    from policy import Policy  # with torch

    return Policy(model)


def record(folder: Path, asked: Sequence[Repository], actions: Sequence[Message]) -> Path:
    """Write a session of each repository, as Claude Code logs it."""
    for one, action in zip(asked, actions, strict=True):
        write_session(folder / f"{one.id}.jsonl", one, action)
    return folder


def answers(
    sessions: Path, asked: Sequence[Repository], regime: Mapping[str, Any], seed: int,
    agent: float = AGENT,
) -> dict[str, Any]:  # fmt: skip
    """Draw what scripted teachers do, by state and model.

    A teacher is ahead of the agent, which is right at a rate of `agent`, by what the regime says. At a share
    of states all are right or wrong together, and wrong in the same way. `habits` draws for a family of
    requests what else is drawn for each state: a teacher that gets one of its requests wrong gets all of
    them wrong, in the same way. `labels` draws one of the six files by a coin, or what is right in another
    repository.
    """
    by_id, found = {one.id: one for one in asked}, {}
    for state in ClaudeCodeIngester().ingest(sessions):
        one = by_id[state["session_id"]]
        place = one.family.name if regime.get("habits") else one.id
        draw = random.Random(f"{seed} {place}")
        shared, wrong = draw.random(), one.wrong_action(draw)
        is_shared = draw.random() < regime.get("shared", 0)
        said = found[state["state_id"]] = {}
        for number, teacher in enumerate(PLAN["teachers"]):
            own = random.Random(f"{seed} {place} {number}")
            if regime.get("labels") == "coin":
                action = one.family.message(own.choice(one.names))
            elif regime.get("labels") == "foreign":
                action = asked[asked.index(one) - 1].right_action(random.Random(0))
            elif (shared if is_shared else own.random()) < agent + regime["ahead"]:
                action = one.right_action(own)
            else:
                action = wrong if is_shared else one.wrong_action(own)
            said[teacher["model"]] = action
    return found


@contextmanager
def served(models: Mapping[str, Path]) -> Iterator[dict[str, str]]:
    """Serve checkpoints as teachers, each by a process of its own; give their addresses by name."""
    running = {}
    try:
        for name, folder in models.items():
            serve = [*TRAINER, "serve", "--model", str(folder), "--name", name]
            running[name] = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
        yield {n: json.loads(each.stdout.readline())["base_url"] for n, each in running.items()}
    finally:
        for process in running.values():
            process.terminate()
            process.wait()


def buy(
    folder: Path, sessions: Path, addresses: Mapping[str, str], purchase: Mapping[str, Any],
    usd: float, until: str = "publish",
) -> None:  # fmt: skip
    """Take sessions to a dataset for so many dollars: five commands and one settings file."""
    lines = ["[replay]\nconfirm_above_usd = 100.0", f"gates = {purchase.get('gates', [])}"]
    lines += [f"[pairs]\nagreement_threshold = {purchase.get('threshold', 2)}"]
    lines += [f"min_p_better = {purchase['min_p_better']}"] if "min_p_better" in purchase else []
    lines += ["[ingest]\nmax_batch_sessions = 1000\n[publish]\ntest_fraction = 0.05"]
    for teacher in PLAN["teachers"][: purchase.get("n_teachers", 3)]:
        address, price = addresses[teacher["model"]], teacher["price"]
        dialect, at_once = ("openrouter", 2) if address.endswith("/api/v1") else ("vllm", 8)
        lines += [
            f'[[replay.teachers]]\nname = "{teacher["name"]}"\nmodel = "{teacher["model"]}"',
            f'base_url = "{address}"\napi_key_env = ""\nmax_concurrency = {at_once}',
            f'dialect = "{dialect}"',
            f"price = {{prompt = {price[0]}e-6, completion = {price[1]}e-6}}",
            "params = {max_completion_tokens = 64, temperature = 0}",
        ]
    folder.mkdir(parents=True, exist_ok=True)
    settings, data = folder / "settings.toml", folder / "data"
    settings.write_text("\n".join(lines) + "\n", "utf-8")
    if until == "pairs":  # the same by plain calls: hundreds of purchases start no processes
        changes = {"ingest": {"sources": [sessions]}}
        work = Pipeline(Settings.load(settings, data_dir=data, changes=changes, env={}))
        [batch] = work.ingest_new()
        work.replay(batch, max_total_usd=usd)
        work.pairs(batch)
        return
    bought = ("replay", "--budget", str(usd), "--yes")
    for words in (("ingest", sessions), bought, *((name,) for name in CHAIN)):
        command(PRODUCT, *words, "--data", data, "--settings", settings, log=folder / "log.txt")


def worth(data: Path, asked: Sequence[Repository]) -> dict[str, Any]:
    """Say what a dataset cost and how right it is, by running its actions."""
    by_id, right = {one.id: one for one in asked}, {"chosen": [], "rejected": [], "action": []}
    for table_name, sides in (("dpo_pairs", ("chosen", "rejected")), ("positives", ("action",))):
        for file in sorted((data / table_name).rglob("*.parquet")):
            for row in pq.read_table(file).to_pylist():
                for side in sides:
                    key = "action_json" if side == "action" else f"{side}_action_json"
                    did, _ = by_id[row["session_id"]].run(json.loads(row[key]))
                    right[side].append(did == "right")
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
        told = {rewards.VARIABLE: json.dumps(drawn), "PYTHONPATH": str(HERE)}
        os.environ.update(told)  # noqa: TID251
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
        """Train three teachers from the agent, each on two of three thirds of other repositories."""
        drawn = repositories(n_form=0, n_train=self.size["n_train"], n_test=0, seed=1000)
        lessons = [replace(one, id=f"lesson-{one.id}") for one in drawn]
        made, steps = {}, PLAN["regimes"][regime]["steps"]
        for number, teacher in enumerate(PLAN["teachers"]):
            folder = self.out / "teachers" / f"{regime}.{number}"
            taught = [one for i, one in enumerate(lessons) if i % 3 != number]
            make = partial(self._taught, self.agent(), folder, taught, steps, number)
            done = kept(folder.parent / f"{folder.name}.json", make) if steps else self.agent()
            made[teacher["model"]] = Path(done)
        return made

    def followed(self, regime: str, arm: Mapping[str, Any]) -> dict[str, str]:
        """Return the setting that names the trained teachers, for an arm that follows their weights."""
        models = list(self.teachers(regime).values()) if "follows" in arm else []
        return {"teachers": json.dumps([{"model": str(one)} for one in models])} if models else {}

    def _taught(
        self, model: Path, folder: Path, taught: Sequence[Repository], steps: int, seed: int
    ) -> str:
        draw = random.Random(seed)
        record(folder / "sessions", taught, [one.wrong_action(draw) for one in taught])
        self.bought(folder, folder / "sessions", taught, "perfect", {}, 10.0)
        settings = PLAN["settings"]["sft"] | {"trl.max_steps": steps, "trl.seed": seed}
        return str(train(model, folder / "data" / "dataset", folder / "model", settings))

    def sessions(self, *, is_scripted: bool = False) -> tuple[Path, float]:
        """Let the agent act in the repositories to train on, and log it; give also how often it is right.

        A scripted agent is right in .45 and needs no model: for the map of what dollars buy.
        """
        asked, draw = self.of("train"), random.Random(0)
        folder = self.out / ("scripted" if is_scripted else "sessions")

        def drawn(one: Repository) -> Message:
            return one.right_action(draw) if draw.random() < AGENT else one.wrong_action(draw)

        def make() -> dict[str, Any]:
            done = [drawn(one) for one in asked] if is_scripted else loaded(self.agent()).act(asked)
            record(folder, asked, done)
            did = [one.run(action)[0] for one, action in zip(asked, done, strict=True)]
            rate = AGENT if is_scripted else did.count("right") / len(did)
            return {"right": rate, "n": len(did)}

        return folder, kept(folder.with_suffix(".json"), make)["right"]

    def bought(
        self, folder: Path, sessions: Path, asked: Sequence[Repository], regime: str,
        purchase: Mapping[str, Any], usd: float, until: str = "publish", agent: float = AGENT,
    ) -> None:  # fmt: skip
        """Serve the teachers of a regime and buy from them."""
        shutil.rmtree(folder / "data", ignore_errors=True)
        if regime.startswith("trained."):
            with served(self.teachers(regime)) as addresses:
                return buy(folder, sessions, addresses, purchase, usd, until)
        said = answers(sessions, asked, PLAN["regimes"][regime], 0, agent)
        with TeacherServer(said) as server:
            addresses = {teacher["model"]: server.base_url for teacher in PLAN["teachers"]}
            return buy(folder, sessions, addresses, purchase, usd, until)

    def purchase(
        self, regime: str, name: str, usd: float, *, is_scripted: bool = False
    ) -> tuple[Path, dict[str, Any]]:
        """Buy a dataset once; give its folder and what it is worth."""
        folder = self.out / ("map" if is_scripted else "bought") / f"{regime}, {name}, {usd:g}"
        asked, until = self.of("train"), "pairs" if is_scripted else "publish"

        def make() -> dict[str, Any]:
            sessions, agent = self.sessions(is_scripted=is_scripted)
            bought = PLAN["purchases"][name]
            self.bought(folder, sessions, asked, regime, bought, usd, until, agent)
            return worth(folder / "data", asked)

        found = kept(folder / "worth.json", make)
        if is_scripted:
            shutil.rmtree(folder / "data", ignore_errors=True)
        return folder / "data", found

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
            settings |= self.followed(regime, arm)
            for number in range(arm.get("rounds", 1)):
                data = self._sampled(folder / f"{number}", data, model) if "rounds" in arm else data
                model = train(model, data / "dataset", folder / f"round-{number}", settings)
            report = json.loads((model.parent / "report.json").read_text("utf-8"))
        tested, policy = self.of("new_repositories", "new_families"), loaded(model)
        seen = zip(tested, policy.act(tested), policy.ranks(tested), strict=True)
        outcomes = [
            [one.id, one.family.name, one.split, one.run(action)[0], is_ranked]
            for one, action, is_ranked in seen
        ]
        if model != self.agent():
            shutil.rmtree(folder)  # weights of half a gigabyte; what they did is what counts
        bought |= {"usd": 0.0} if arm.get("is_free") else {}
        return {"bought": bought, "outcomes": outcomes, "report": report}

    def _sampled(self, folder: Path, data: Path, model: Path) -> Path:
        """Sample the trainee where the teachers agree, and publish pairs of what differs."""
        copy = folder / "data"
        shutil.copytree(data, copy, dirs_exist_ok=True)
        settings = shutil.copy(data.parent / "settings.toml", folder)  # for the next round too
        where = ("--data", copy, "--settings", settings)
        for words in (("sample", "--trainee", model), *((name,) for name in CHAIN[1:])):
            command(PRODUCT, *words, *where, log=folder / "log.txt")
        return copy


def is_asked(arm: Mapping[str, Any], regime: str, options: Any, *, is_first: bool) -> bool:
    """Say whether an arm runs by the first or a further seed; where none are named, `arms.toml` decides."""
    if "follows" in arm and not regime.startswith("trained."):
        return False  # scripted teachers have no weights
    if options.arms is not None:
        return arm["name"] in options.arms and (is_first or "purchase" in arm)
    if regime != "stronger":
        return is_first and "is_everywhere" in arm
    return (options.size != "quick" or "is_quick" in arm) and (is_first or "is_candidate" in arm)


def report(found: Mapping[str, Any]) -> int:
    """Print the table; 1 if a control passed the check that it must fail."""
    passed = []
    for regime, of in found["regimes"].items():
        for name, row in of["arms"].items():
            verdict = "; ".join(row.get("check", [])) or "passes"
            right = f"{row.get('executed', 0):.3f} {row.get('interval', '')}"
            print(f"{regime:20} {name:28} {right} {verdict}")
            passed += [name] if name in table.CONTROLS and not row["check"] else []
        print(json.dumps(of.get("named")))
    return int(bool(passed))


def main() -> int:
    """Run what is asked for, and write the table."""
    names = ", ".join(arm["name"] for arm in PLAN["arms"])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", default="full", choices=PLAN["sizes"])
    parser.add_argument("--model", type=Path, default=WEIGHTS)
    parser.add_argument("--regimes", nargs="+", choices=PLAN["regimes"])
    parser.add_argument("--arms", nargs="*", help=f"of {names}; without a name none")
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--draw", type=int, default=0, help="seed of repositories and requests")
    shares = {"metavar": "SHARE", "help": "shares of the dollars at which all is bought"}
    parser.add_argument("--map", nargs="*", type=float, default=(), **shares)
    options = parser.parse_args()
    work = Work(options.folder, options.model, PLAN["sizes"][options.size], options.draw)
    for share in options.map:
        for regime in ("stronger", "equal", "weaker", "shared"):
            for name in ("one", "consensus", "cheap_first", "value", "p_better"):
                work.purchase(regime, name, round(share * work.size["usd"], 6), is_scripted=True)
    is_part = options.arms is not None or options.size == "quick"
    planned = [name for name, of in PLAN["regimes"].items() if "by_name" not in of]
    regimes = options.regimes or (["stronger"] if is_part else planned)
    seeds = options.seeds or ([0] if options.size == "quick" else [0, 1, 2])
    for seed, regime, arm in product(seeds, regimes, PLAN["arms"]):
        if is_asked(arm, regime, options, is_first=seed == seeds[0]):
            work.arm(regime, arm, seed)
            table.write(options.folder, PLAN)
    return report(table.write(options.folder, PLAN))


if __name__ == "__main__":
    sys.exit(main())
