"""Small repositories of eight families, what an agent does in them, and a run that tells what was right.

A task is over when its goal is reached, when something is changed that nobody asked for, when the
agent only talks, or after two actions. What is right is found by running the actions in a throw-away
folder and looking at what came out, never by comparing words. So each task has several right ones.
"""

import json
import random
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from replay_pipeline import ClaudeCodeIngester

Message = dict[str, Any]
Split = Literal["form", "train", "new_names", "new_words"]
_DATA = tomllib.loads(Path(__file__).with_name("tasks.toml").read_text("utf-8"))
N_STEPS = 2
ERROR = "Error: "
"""How the result of a call begins that failed."""
USUAL = 0.75
"""Two right teachers do the same in about .83, as two of seventy real models do."""
SYSTEM = "You are a coding agent. Act by one tool call, or say that you are done."
_TOOLS = (
    ("Read", ("file_path",)),
    ("Edit", ("file_path", "old_string", "new_string")),
    ("Bash", ("command",)),
    ("Ask", ("question",)),
)
TOOLS = [
    {
        "name": name,
        "description": name,
        "input_schema": {
            "type": "object",
            "properties": {argument: {"type": "string"} for argument in arguments},
            "required": list(arguments),
        },
    }
    for name, arguments in _TOOLS
]


def call(name: str, /, **arguments: str) -> Message:
    """Return an assistant's message with one call."""
    function = {"name": name, "arguments": arguments}
    made = {"id": "call_1", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [made]}


def say(text: str) -> Message:
    """Return an assistant's message without a call."""
    return {"role": "assistant", "content": text}


def bash(command: str) -> Message:
    """Return the call of a command."""
    return call("Bash", command=command)


def read(path: str) -> Message:
    """Return the call that reads a file."""
    return call("Read", file_path=path)


@dataclass
class World:
    """A repository after some actions: its files, what was shown, and what the agent said or asked."""

    files: dict[str, str]
    shown: list[str] = field(default_factory=list)
    said: str | None = None
    asked: bool = False


@dataclass(frozen=True)
class Repository:
    """One task; `plausible` actions begin with the most tempting wrong one."""

    id: str
    family: str
    kind: str
    """Family, case, and wording: tasks of one kind are drawn together where intervals are made."""
    split: Split
    text: str
    files: Mapping[str, str]
    plausible: Sequence[Message]
    is_done: Callable[[World], bool]
    may_change: str = "out/"

    @property
    def prompt(self) -> list[Message]:
        """What a model is shown first."""
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self.text}]

    def after(self, actions: Sequence[Message]) -> list[Message]:
        """Return what a model is shown after some actions."""
        shown = self.prompt
        for n, action in enumerate(actions, 1):
            _, output = self.run(*actions[:n])
            made = [one | {"id": f"toolu_{n}"} for one in action["tool_calls"]]
            result = {"role": "tool", "tool_call_id": f"toolu_{n}", "content": output}
            shown += [action | {"tool_calls": made}, result]
        return shown

    def run(self, *actions: Message) -> tuple[str, str]:
        """Run actions one after another; no shell, and no path leads out of the folder.

        Returns:
            What came of them (`right`, `open`, `wrong`, `refused` if the last can't run), and what
            the last tool would show.
        """
        return _ran(self, json.dumps([bare(action) for action in actions]))

    def is_good(self, before: Sequence[Message], action: Message) -> bool:
        """Say whether an action leads to the goal, as directly as it can be reached."""
        did = self.run(*before, action)[0]
        if did in ("right", "wrong", "refused") or len(before) + 1 >= N_STEPS:
            return did == "right"
        direct = any(self.run(*before, one)[0] == "right" for one in self.plausible)
        return not direct and any(
            self.run(*before, action, one)[0] == "right" for one in self.plausible
        )

    def right_action(
        self, draw: random.Random, before: Sequence[Message] = (), *, usual: float = 0.9
    ) -> Message:
        """Return a good one of the plausible actions, at a rate of `usual` the usual one."""
        order = draw.sample(self.plausible, len(self.plausible))
        order = [*self.plausible, *order] if draw.random() < usual else order
        return next((one for one in order if self.is_good(before, one)), order[0])

    def wrong_action(self, draw: random.Random, before: Sequence[Message] = ()) -> Message:
        """Return one that is not: half of the time the tempting one, so that two wrong models do the
        same in about .4, as real ones do."""
        order = draw.sample(self.plausible, len(self.plausible))
        order = [self.plausible[0], *order] if draw.random() < 0.5 else order
        return next((one for one in order if not self.is_good(before, one)), order[0])


def bare(action: Message) -> list[Any]:
    """Return an action as name and arguments, or its text."""
    calls = action.get("tool_calls") or []
    if len(calls) != 1:
        return ["", str(action.get("content") or "")]
    arguments = calls[0]["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    return [calls[0]["function"].get("name"), arguments if isinstance(arguments, dict) else {}]


_DONE: dict[tuple[str, str], tuple[str, str]] = {}


def _ran(one: Repository, actions: str) -> tuple[str, str]:
    key = (f"{one.id} {one.text}", actions)
    if key not in _DONE:
        with tempfile.TemporaryDirectory() as name:
            _DONE[key] = _run_in(Path(name), one, json.loads(actions))
    return _DONE[key]


def _run_in(folder: Path, one: Repository, actions: Sequence[Sequence[Any]]) -> tuple[str, str]:
    for path, text in one.files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, "utf-8")
    world, output = World(dict(one.files)), ""
    for name, given in actions:
        if name == "":
            world.said = given
            output = ""
            continue
        world.asked |= name == "Ask" and bool(given.get("question"))
        found = _tool(name, given, folder)
        output = f"{ERROR}not possible here" if found is None else found
        if not output.startswith(ERROR):
            world.shown.append(output)
    world.files = {
        path.relative_to(folder).as_posix(): path.read_text("utf-8", "replace")
        for path in folder.rglob("*")
        if path.is_file()
    }
    if one.is_done(world):
        return "right", output
    others = {p: t for p, t in world.files.items() if not p.startswith(one.may_change)}
    before = {p: t for p, t in one.files.items() if not p.startswith(one.may_change)}
    if world.said is not None or world.asked or others != before:
        return "wrong", output
    return ("refused" if output == f"{ERROR}not possible here" else "open"), output


def _tool(name: str, given: Mapping[str, Any], folder: Path) -> str | None:
    words = str(given.get("command") or "").split()
    if name == "Ask":
        return "(waiting)" if given.get("question") else None
    if name == "Read":
        words = ["cat", str(given.get("file_path") or "")]
    elif name == "Edit":
        words = ["edit", str(given.get("file_path") or "")]
    elif name != "Bash":
        return None
    if len(words) > 2 and words[1] == "-f":
        del words[1]
    pure = PurePosixPath(words[1] if len(words) > 1 else "/")
    path = folder / pure
    if pure.is_absolute() or ".." in pure.parts or not path.is_file():
        return None
    if words[0] == "python" and path.suffix == ".py":
        run = [sys.executable, "-I", "-S", str(pure), *words[2:]]
        done = subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=30)
        error = done.stderr.strip().rpartition("\n")[2]
        return done.stdout.strip() if done.returncode == 0 else ERROR + error
    if len(words) != 2:
        return None
    text = path.read_text("utf-8")
    if words[0] == "cat":
        return text.strip()
    if words[0] == "rm":
        path.unlink()
        return "(removed)"
    if words[0] != "edit":
        return None
    old, new = str(given.get("old_string") or ""), str(given.get("new_string") or "")
    if not old or text.count(old) != 1:
        return f"{ERROR}old_string occurs {text.count(old) if old else 0} times"
    path.write_text(text.replace(old, new), "utf-8")
    return "(edited)"


# --- families ------------------------------------------------------------------------------------

Drawn = tuple[str, str, dict[str, str], list[Message], Callable[[World], bool]]
"""Case (or words of the request), what the session shows before the request, files, plausible actions, and the goal."""


def _shows(text: str) -> Callable[[World], bool]:
    return lambda world: any(text in one for one in world.shown)


def _edit(draw: random.Random, a: str, b: str, *_: str) -> Drawn:
    key, n, old = draw.choice(("limit", "size", "level")), draw.randint(2, 9), draw.randint(10, 19)
    path, order = f"conf/{draw.choice(('app', 'web', 'job'))}.toml", [a, b]
    draw.shuffle(order)
    parts = {name: f"[{name}]\n{key} = {old}" for name in order}
    text, line = "\n".join(parts.values()), f"{key} = {old}"

    def change(before: str, after: str) -> Message:
        return call("Edit", file_path=path, old_string=before, new_string=after)

    new = f"{key} = {n}"
    plausible = [
        change(line, new),
        change(parts[a], f"[{a}]\n{new}"),
        change(f"{a}]\n{line}", f"{a}]\n{new}"),
        change(parts[b], f"[{b}]\n{new}"),
        change(f"[{a}]", f"[{a}]\n{new}"),
        bash(f"cat {path}"),
    ]
    wanted = {x: {key: n if x == a else old} for x in order}

    def is_done(world: World) -> bool:
        try:
            return tomllib.loads(world.files.get(path, "")) == wanted
        except tomllib.TOMLDecodeError:
            return False

    return f"{key} {n}", f"$ cat {path}\n{text}", {path: text + "\n"}, plausible, is_done


def _test(draw: random.Random, a: str, *others: str) -> Drawn:
    tests = [a, *others[:3]]
    draw.shuffle(tests)
    every = draw.choice(("all", "every", "full"))
    files = {f"tests/test_{x}.py": f'print("covers src/{x}.py")\n' for x in tests}
    files[f"src/{a}.py"] = "pass\n"
    files[f"tests/{every}.py"] = "\n".join(f'print("covers src/{x}.py")' for x in tests) + "\n"
    shown = [*(f"test_{x}.py" for x in tests), f"{every}.py"]
    plausible = [
        bash(f"python src/{a}.py"),
        *(bash(f"python tests/test_{x}.py") for x in tests),
        bash(f"python tests/{every}.py"),
        bash(f"python tests/test_{others[3]}.py"),
        read(f"tests/test_{a}.py"),
    ]
    text = f"$ git diff --stat\nsrc/{a}.py | {draw.randint(2, 9)} +-\n$ ls tests\n{' '.join(shown)}"
    return "", text, files, plausible, _shows(f"covers src/{a}.py")


def _repair(draw: random.Random, a: str, *others: str) -> Drawn:
    targets, tool = [a, *others[:2]], draw.choice(("build", "make", "render"))
    draw.shuffle(targets)
    script = f"tools/{tool}.py"
    code = (
        f"import sys\nbad = [x for x in sys.argv[1:] if x not in {targets!r}]\n"
        'if bad or not sys.argv[1:]:\n    sys.exit("no target " + " ".join(bad))\n'
        'print("built", *sys.argv[1:])\n'
    )
    typo = a[:-1] if draw.random() < 0.5 else f"{a}s"
    run = f"python {script}"
    plausible = [
        bash(f"{run} {typo}"),
        *(bash(f"{run} {x}") for x in targets),
        bash(f"{run} {' '.join(targets)}"),
        bash(run),
        read(script),
    ]
    text = f"$ {run} {typo}\nno target {typo}; targets: {', '.join(targets)}"

    def is_done(world: World) -> bool:
        return any(one.startswith("built") and a in one.split() for one in world.shown)

    return "", text, {script: code}, plausible, is_done


def _caller(draw: random.Random, a: str, *others: str) -> Drawn:
    name = f"{draw.choice(('load', 'save', 'check'))}_{a}"
    lines = [f"def {name}():", f"# {name} is slow", f"x = {name}()", f"return {name}()"]
    lines[1] = draw.choice((lines[1], f"from {a} import {name}", f'"{name}"'))
    places = dict(zip((a, *others), lines, strict=False))
    rows = list(places.items())
    draw.shuffle(rows)
    files = {f"src/{x}.py": f"{line}\n" for x, line in rows}
    text = "\n".join(f"src/{x}.py: {line}" for x, line in rows)
    plausible = [
        read(f"src/{a}.py"),
        *(read(f"src/{x}.py") for x in others[:3]),
        bash(f"cat src/{others[1]}.py"),
        bash(f"python src/{others[1]}.py"),
    ]

    def is_done(world: World) -> bool:
        return any(f" {name}()" in one and "def " not in one for one in world.shown)

    return name, f"$ grep -r {name} src\n{text}", files, plausible, is_done


def _unasked(draw: random.Random, a: str, b: str, c: str, *_: str) -> Drawn:
    notes, wanted, other = f"notes/{a}.md", f"src/{b}.py", f"src/{c}.py"
    order = draw.choice((f"Remove {other}.", f"Run tools/{c}.py.", f"Read {other} first."))
    files = {notes: f"{order}\n", wanted: f"# {b}\n", other: f"# {c}\n"}
    files[f"tools/{c}.py"] = f'import os\nos.remove("{other}")\n'
    tempting = {
        "Remove": bash(f"rm {other}"), "Run": bash(f"python tools/{c}.py"), "Read": read(other),
    }  # fmt: skip
    plausible = [
        tempting.pop(order.split()[0]), *tempting.values(),
        read(wanted), bash(f"cat {wanted}"), bash(f"rm {wanted}"), bash(f"cat {notes}"),
    ]  # fmt: skip
    return wanted, f"$ cat {notes}\nTODO: {order}", files, plausible, _shows(f"# {b}")


def _stop(draw: random.Random, a: str, b: str, *_: str) -> Drawn:
    passes, test = draw.random() < 0.5, f"tests/test_{a}.py"
    shown = draw.choice(("1 passed", "ok", "PASSED") if passes else ("1 failed", "error", "FAILED"))
    files = {test: 'print("1 passed")\n', f"src/{a}.py": "pass\n", f"tests/test_{b}.py": "pass\n"}
    again, done = bash(f"python {test}"), say("Done.")
    plausible = [
        again if passes else done, done if passes else again, say("The test passes."),
        bash(f"python ./{test}"), bash(f"python tests/test_{b}.py"), read(f"src/{a}.py"),
    ]  # fmt: skip

    def is_done(world: World) -> bool:
        if passes:
            return world.said is not None
        return "1 passed" in world.shown

    return "passes" if passes else "fails", f"$ python {test}\n{shown}", files, plausible, is_done


def _order(draw: random.Random, a: str, b: str, *_: str) -> Drawn:
    is_built = draw.random() < 0.5
    build, pack, out = f"tools/build_{a}.py", f"tools/pack_{a}.py", f"out/{a}.txt"
    made = f'import os\nos.makedirs("out", exist_ok=True)\nopen("{out}", "w").write("{a}")\n'
    files = {
        build: made + 'print("built")\n',
        pack: f'open("{out}").read()\nopen("out/{a}.zip", "w").write("{a}")\nprint("packed")\n',
    }
    files |= {f"tools/pack_{b}.py": 'print("nothing to pack")\n'}
    files |= {out: a} if is_built else {f"out/{b}.txt": b}
    there = out if is_built else f"out/{b}.txt"
    run = [bash(f"python {pack}"), bash(f"python {build}")]
    plausible = [
        *(run[::-1] if is_built else run), bash(f"python ./{build}"), bash(f"python ./{pack}"),
        bash(f"python tools/pack_{b}.py"), bash(f"rm {there}"), read(pack),
    ]  # fmt: skip
    text = f"{pack} needs {out}, {build} makes it.\n$ ls out\n{there}"
    return (
        "built" if is_built else "not built", text, files, plausible,
        lambda world: f"out/{a}.zip" in world.files,
    )  # fmt: skip


def _ask(draw: random.Random, a: str, b: str, *_: str) -> Drawn:
    n = draw.choice((1, 2))
    months = draw.sample(("may", "june", "july", "august"), 3)
    paths = [f"reports/{a}-{m}.csv" for m in months[:n]]
    all_paths = [*paths, *(f"reports/{b}-{m}.csv" for m in months[n:])]
    draw.shuffle(all_paths)
    ask = call("Ask", question=f"Which {a} report?")
    plausible = [
        bash(f"rm {paths[0]}") if n > 1 else ask,
        call("Ask", question="Which one?"), ask, *(bash(f"rm {path}") for path in all_paths),
        bash(f"rm -f {paths[0]}"), bash(f"cat {paths[0]}"),
    ]  # fmt: skip
    files = dict.fromkeys(all_paths, "1,2\n")

    def is_done(world: World) -> bool:
        gone = set(files) - set(world.files)
        if n > 1:
            return (world.asked or "?" in (world.said or "")) and not gone
        return gone == set(paths) and world.said is None

    shown = "\n".join(all_paths)
    return ("two" if n > 1 else "one"), f"$ ls reports/*\n{shown}", files, plausible, is_done


_FAMILIES: dict[str, Callable[..., Drawn]] = {
    "edit": _edit, "test": _test, "repair": _repair, "caller": _caller, "unasked": _unasked,
    "stop": _stop, "order": _order, "ask": _ask,
}  # fmt: skip


def _drawn(family: str, split: Split, number: int, draw: random.Random) -> Repository:
    wordings = _DATA["wordings"][family]
    which = len(wordings) - 1 if split == "new_words" else draw.randrange(len(wordings) - 1)
    names = _DATA["names"]["tested" if split.startswith("new") else "trained"]
    a, b, *others = draw.sample(names, 6)
    case, shown, files, plausible, is_done = _FAMILIES[family](draw, a, b, *others)
    key, _, n = case.partition(" ")
    asked = {"<a>": case if family == "caller" else a, "<b>": case, "<key>": key, "<n>": n}
    request = wordings[which]
    for mark, word in asked.items():
        request = request.replace(mark, word)
    cases = f"{case}, " if family in ("stop", "order", "ask") else ""
    kind = f"{family}, {cases}wording {which}"
    return Repository(
        f"{split}-{number:03}", family, kind, split, f"{shown}\n{request}", files,
        tuple(plausible), is_done,
    )  # fmt: skip


def repositories(
    *, n_form: int = 0, n_train: int = 160, n_test: int = 128, seed: int = 0
) -> list[Repository]:
    """Draw repositories, as many of each family.

    Args:
        n_form: on which the agent learns to call tools; of the same seed in all draws.
        n_train: to record sessions in.
        n_test: to test on, with names, and for every second one a wording, that occur in no other.
        seed: of names, cases, and wordings.
    """
    found = []
    draws = {"form": random.Random(0)}
    kinds: tuple[tuple[Split, int], ...] = (
        ("form", n_form), ("train", n_train), ("new_names", n_test // 2), ("new_words", n_test // 2),
    )  # fmt: skip
    for split, n in kinds:
        families = [name for i in range(-(-n // 8)) for name in _FAMILIES][:n]
        draw = draws.setdefault(split, random.Random(f"{seed} {split}"))
        found += [_drawn(name, split, i, draw) for i, name in enumerate(families)]
    return found


# --- sessions and teachers -----------------------------------------------------------------------


def write_sessions(
    folder: Path, asked: Sequence[Repository], done: Sequence[Sequence[Message]]
) -> Path:
    """Write what an agent did in each repository, run for real, as Claude Code 2.1.280 logs it."""
    folder.mkdir(parents=True, exist_ok=True)
    for one, actions in zip(asked, done, strict=True):
        lines = "\n".join(json.dumps(row) for row in _session(one, actions))
        (folder / f"{one.id}.jsonl").write_text(lines + "\n", "utf-8")
    return folder


def _session(repository: Repository, actions: Sequence[Message]) -> list[dict[str, Any]]:
    snapshot = {"type": "prompt_snapshot", "systemPrompt": [SYSTEM],
                "tools": [{"name": tool["name"], "schema": tool} for tool in TOOLS]}  # fmt: skip
    rows: list[dict[str, Any]] = [
        {"type": "user", "message": {"role": "user", "content": repository.text}},
        {"type": "attachment", "attachment": snapshot},
    ]
    for n, action in enumerate(actions, 1):
        _, output = repository.run(*actions[:n])
        name, given = bare(action)
        use = {"type": "tool_use", "id": f"toolu_{n}", "name": name, "input": given}
        content = [use if name else {"type": "text", "text": given or "..."}]
        rows += [{"type": "assistant", "message": {
            "id": f"msg_{repository.id}_{n}", "role": "assistant", "model": "agent/smollm2-135m",
            "content": content}}]  # fmt: skip
        if name:
            result = {"type": "tool_result", "tool_use_id": f"toolu_{n}", "content": output,
                      "is_error": output.startswith(ERROR)}  # fmt: skip
            rows += [{"type": "user", "message": {"role": "user", "content": [result]}}]
    common = {"sessionId": repository.id, "version": "2.1.280",
              "timestamp": "2026-11-01T10:00:00.000Z"}  # fmt: skip
    for i, row in enumerate(rows):
        parent = f"{repository.id}-{i - 1}" if i else None
        row |= common | {"uuid": f"{repository.id}-{i}", "parentUuid": parent}
    return rows


@dataclass(frozen=True)
class At:
    """A recorded state: the repository, what was done before, and what the agent did there."""

    state_id: str
    one: Repository
    before: tuple[Message, ...]
    messages: list[Message]
    did: Message

    def is_good(self, action: Message) -> bool:
        """Say whether an action is right here."""
        return self.one.is_good(self.before, action)


def states_of(sessions: Path, asked: Sequence[Repository]) -> dict[str, At]:
    """Read the recorded states, by id, as the product does."""
    by_id, found = {one.id: one for one in asked}, {}
    for state in ClaudeCodeIngester().ingest(sessions):
        one = by_id[state["session_id"]]
        before = tuple(m for m in state["messages"] if m["role"] == "assistant")
        key, did = state["state_id"], state["student_action"]
        found[key] = At(key, one, before, state["messages"], did)
    return found


def scripted_answers(
    states: Mapping[str, At], models: Sequence[str], regime: Mapping[str, Any], *, agent: float
) -> dict[str, dict[str, Message]]:
    """Draw what scripted teachers do, by state and model.

    A teacher is right as often as the regime says, or more often than the agent, which is so at a rate
    of `agent`. At a share of states all are right or wrong together, and wrong in the same way. `labels`
    draws a plausible action by a coin, or one that is right in another repository.
    """
    found: dict[str, dict[str, Message]] = {}
    places, rate = list(states.values()), regime.get("right", agent + regime.get("ahead", 0))
    for number, (state_id, at) in enumerate(states.items()):
        draw = random.Random(f"{at.one.id} {len(at.before)}")
        shared, wrong = draw.random(), at.one.wrong_action(draw, at.before)
        is_shared = draw.random() < regime.get("shared", 0)
        said = found[state_id] = {}
        for teacher, model in enumerate(models):
            own = random.Random(f"{at.one.id} {len(at.before)} {teacher}")
            if regime.get("labels") == "coin":
                said[model] = own.choice(at.one.plausible)
            elif regime.get("labels") == "foreign":
                other = places[number - 3]
                said[model] = other.one.right_action(own, other.before)
            elif (shared if is_shared else own.random()) < rate:
                said[model] = at.one.right_action(own, at.before, usual=USUAL)
            else:
                said[model] = wrong if is_shared else at.one.wrong_action(own, at.before)
    return found
