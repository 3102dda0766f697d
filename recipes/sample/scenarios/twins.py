"""Sessions of minimal twins: the same two actions at two states, and the prompt decides between them.

A twin is told twice in one session, once each way round: what a failing test, a search, a status, a
rule, an error or the user says calls for the one action in the first telling and for the other in the
second. The student takes the wrong one both times. Nothing about the two actions tells which is
better, since each is the better one as often as the worse one.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

from story import Answer, Broken, Call, Looked, Story, bash, edit, grep, read, todo

Telling = Callable[["Sitting", str, str], None]
"""Tells one state of a twin: the name that the prompt calls for, then the other one."""
Aside = Callable[["Sitting", str], None]
"""Tells a state of another kind about one part of the project."""


@dataclass(frozen=True)
class Project:
    """How one invented project names its files and runs its tools."""

    cwd: str
    source: str
    test: str
    suite: str
    one_test: str
    failed: str
    missing: str
    start: str
    install: str
    function: str
    line: str

    def files(self, parts: dict[str, str], packages: Sequence[str]) -> dict[str, str]:
        """Return its files: a source and a test for each part, and the papers of the project."""
        found = {self.source.format(n): self.line.format(n, what) for n, what in parts.items()}
        found |= {self.test.format(n): self.line.format(f"test_{n}", n) for n in parts}
        found |= {
            f"docs/{name}.md": f"# {name}\n\n    {command}\n" for name, command in RULES.items()
        }
        settings = "".join(f"{key} = {USUAL}\n" for key in KEYS)
        return found | {"settings.toml": f"{settings}# {', '.join(packages)}\n"}


KEYS = ("width", "limit", "retries", "days", "depth", "rows")
"""What stands in the settings, each with the same value at first."""
USUAL = "28"
RULES = {
    "review": "make lint",
    "release": "make dist",
    "nightly": "make bench",
    "docs": "make site",
}
"""What the project's own papers ask for, by the name of the paper."""

TIDELINE = Project(
    cwd="/home/mira/code/tideline",
    source="tideline/{}.py",
    test="tests/test_{}.py",
    suite="pytest -q",
    one_test="pytest tests/test_{}.py",
    failed="FAILED tests/test_{0}.py::test_{0} - AssertionError\n1 failed, 23 passed",
    missing="ModuleNotFoundError: No module named '{0}'\ntry: pip install {0}",
    start="python -m tideline.cli Saltmouth",
    install="pip install {}",
    function="{}_of",
    line='"""{1}."""\n\n\ndef {0}_of(port):\n    return port.{0}\n',
)
STACKS = Project(
    cwd="/home/jonas/work/stacks",
    source="stacks/{}.py",
    test="tests/test_{}.py",
    suite="pytest -x -q",
    one_test="pytest tests/test_{}.py",
    failed="FAILED tests/test_{0}.py::test_{0} - KeyError\n1 failed, 31 passed",
    missing="ModuleNotFoundError: No module named '{0}'\ntry: pip install {0}",
    start="python -m stacks.serve",
    install="pip install {}",
    function="{}_of",
    line='"""{1}."""\n\n\ndef {0}_of(member):\n    return member.{0}\n',
)
CSVMEND = Project(
    cwd="/Users/lena/src/csvmend",
    source="src/{}.rs",
    test="tests/{}.rs",
    suite="cargo test -q",
    one_test="cargo test --test {}",
    failed="test {0}_is_kept ... FAILED\npanicked at tests/{0}.rs:9:5",
    missing="error[E0432]: unresolved import `{0}`\nhelp: run `cargo add {0}`",
    start="cargo run -q -- a.csv",
    install="cargo add {}",
    function="{}_field",
    line="//! {1}.\n\npub fn {0}_field(text: &str) -> &str {{\n    text\n}}\n",
)
KILN = Project(
    cwd="/home/noor/dev/kiln-log",
    source="src/{}.ts",
    test="test/{}.test.ts",
    suite="npx vitest run",
    one_test="npx vitest run test/{}.test.ts",
    failed=" FAIL  test/{0}.test.ts > {0}\n Tests  1 failed | 17 passed",
    missing="Error: Cannot find package '{0}'\nRun: npm install {0}",
    start="npx tsx src/main.ts",
    install="npm install {}",
    function="{}Of",
    line="// {1}.\nexport function {0}Of(log: Log) {{\n  return log.{0};\n}}\n",
)

REMARKS = cycle(
    ["On it.", "Let me see.", "One moment.", "I'll start there.", "Right away.", "Next step."]
)


class Sitting:
    """A session in the telling: the story, its project, and what varies from one turn to the next."""

    def __init__(self, story: Story, project: Project) -> None:
        self.story, self.project = story, project
        self.n_turns = 0
        self._dissent = {
            "Edit": cycle(("", "", "", "g", "", "", "", "", "", "", "d", "", "")),
            "Bash": cycle(("", "g", "", "", "d", "", "q")),
        }
        self._looking = cycle(("", "d", "", "q"))
        self._seen: Call | None = None
        self._elsewhere = cycle(
            (
                bash("git log --oneline -5"),
                grep("TODO"),
                bash("ls"),
                bash("git branch"),
                bash("git remote -v"),
                bash("git stash list"),
            )
        )

    def asked(self, *wordings: str) -> None:
        """Let the user ask, in one of several wordings."""
        self.story.user(wordings[self.n_turns % len(wordings)])
        self.n_turns += 1

    def looks(self, call: Call, out: str | None = None, *, code: int = 0) -> None:
        """Let the student look something up as its teachers would, by and large."""
        self._seen = call
        if self.n_turns % 3 == 0:
            kept = {"d": self._else(), "q": self._else(), "g": self._said(call)}
            self.story.act(next(REMARKS), call, out=out, code=code, **kept)
        else:
            self.story.act(
                next(REMARKS),
                call,
                out=out,
                code=code,
                same="dqg",
                **{name: self._said(call, name) for name in "dqg"},
            )

    def errs(
        self,
        wrong: Call,
        right: Call,
        out: str | None = None,
        *,
        code: int = 0,
        wider: Call | None = None,
    ) -> None:
        """Let the student take the action that this prompt does not call for."""
        missing = next(self._dissent[right.name])
        answers: dict[str, Answer] = {name: self._said(right, name) for name in "dqg"}
        if missing:
            answers[missing] = self._else()
        elif looks := next(self._looking):
            first = todo("Do what was asked") if looks == "d" else self._seen
            if first is not None:
                missing, answers[looks] = looks, Looked(first, self._said(right, looks))
        elif wider is not None:
            answers["g"] = wider
        agreeing = "".join(name for name in "dqg" if name != missing)
        self.story.act(
            next(REMARKS), wrong, out=out, code=code, pair=agreeing, kind="misread", **answers
        )

    def closes(self, said: str, *, otherwise: Sequence[str]) -> None:
        """Let the student end its turn; each teacher would end it in another way."""
        d, q = otherwise
        if self.n_turns % 2:
            self.story.act(said, d=d, q=q, g=Looked(todo("Say what was done"), f"Done: {said}"))

    def _said(self, call: Call, name: str = "g") -> Call:
        if call.name == "Bash" and name == "g":
            return bash(f"cd {self.project.cwd} && {call.args['command']}")
        return call.say(next(REMARKS)) if name == "d" else call

    def _else(self) -> Call:
        return next(self._elsewhere)


def sets(s: Sitting, key: str, right: str, wrong: str, told: Call | str, out: str = "") -> None:
    """Tell of a value in the settings, and last of what decides between two: a look, or the user."""
    settings = s.story.files["settings.toml"]
    s.story.files["settings.toml"] = re.sub(rf"(?m)^{key} = .*", f"{key} = {USUAL}", settings)
    s.looks(read("settings.toml"))
    if isinstance(told, str):
        s.story.user(told)
    else:
        s.looks(told, out, code=int("FAIL" in out))
    old, new = f"{key} = {USUAL}", f"{key} = {right}"
    lines = s.story.files["settings.toml"].splitlines()
    after = lines[lines.index(old) + 1]
    s.errs(
        edit("settings.toml", old, f"{key} = {wrong}"),
        edit("settings.toml", old, new),
        wider=edit("settings.toml", f"{old}\n{after}", f"{new}\n{after}")
        if key == "width"
        else None,
    )


def value_of(name: str) -> str:
    """Return the value that goes with a part of a project."""
    return str(30 + sum(name.encode()) % 60)


def suite(s: Sitting, right: str, wrong: str) -> None:
    """Tell of a test that fails and says which of two values it expects."""
    p, value = s.project, value_of(right)
    x, y = sorted((value, value_of(wrong)))
    s.asked(
        f"settings.toml needs limit = {x} or limit = {y}: run the tests and see which.",
        f"Something is red. The test wants limit = {x} or limit = {y} in settings.toml.",
        f"Does everything pass? If not, limit = {x} or limit = {y} in settings.toml mends it.",
        f"Once more the suite; it asks for limit = {x} or for limit = {y} in settings.toml.",
    )
    out = f"{p.failed.format(right)}\nFAILED: limit = {value} expected"
    sets(s, "limit", value, value_of(wrong), bash(p.suite), out)


def named(s: Sitting, right: str, wrong: str) -> None:
    """Tell of a test that the user names."""
    p = s.project
    s.asked(
        f"Please run {p.test.format(right)} alone.",
        f"I changed something; does {p.test.format(right)} still pass?",
        f"Leave that. Now only {p.test.format(right)}, please run it.",
        f"Could you try {p.test.format(right)}?",
    )
    s.errs(bash(p.one_test.format(wrong)), bash(p.one_test.format(right)), "3 passed")
    s.closes("It passes.", otherwise=("Three tests pass.", "Nothing failed in the file you named."))


def search(s: Sitting, right: str, wrong: str) -> None:
    """Tell of a paper of the project in which a search finds the value."""
    value = value_of(right)
    a, b = sorted((right, wrong))
    x, y = sorted((value, value_of(wrong)))
    s.asked(
        f"retries = {x} or retries = {y}? Search the papers on {a} and {b}, and put it into settings.toml.",
        f"Find in docs which we want for {a} and {b}, retries = {x} or retries = {y}. Set it in settings.toml.",
        f"Set retries = {x} or retries = {y} in settings.toml, as docs has it for {a} or {b}.",
        f"One of the papers on {a} and {b} says retries = {x} or retries = {y}; settings.toml should, too.",
    )
    sets(
        s, "retries", value, value_of(wrong),
        bash("grep -rn retries docs"), f"docs/{right}.md:7:retries = {value}",
    )  # fmt: skip


def status(s: Sitting, right: str, wrong: str) -> None:
    """Tell of the last commit, which names the value."""
    value = value_of(right)
    a, b = sorted((right, wrong))
    x, y = sorted((value, value_of(wrong)))
    s.asked(
        f"{a} and {b}: days = {x} or days = {y}? The last commit says it; settings.toml should, too.",
        f"Set days = {x} or days = {y} in settings.toml, whichever the last commit names for {a} and {b}.",
        f"Look at the last commit on {a} and {b}: it wants days = {x} or days = {y} in settings.toml.",
        f"days = {x} or days = {y} for {a} and {b}, I forgot. See the last commit, and mend settings.toml.",
    )
    log = bash("git log -1 --format=%s")
    sets(s, "days", value, value_of(wrong), log, f"{right}: days = {value}")


def history(s: Sitting, right: str, wrong: str) -> None:
    """Tell of a value that the user names when asked for it."""
    value = value_of(right)
    x, y = sorted((value, value_of(wrong)))
    s.asked(
        f"A depth of {x} or of {y} in settings.toml? Show me the file first.",
        f"We may want a depth of {x} or {y}. What is in settings.toml now?",
        f"Open settings.toml, I have to choose between a depth of {x} and {y}.",
        f"Before I say {x} or {y} for the depth, read settings.toml.",
    )
    sets(s, "depth", value, value_of(wrong), f"For {right}: depth = {value}.")


def both(s: Sitting, right: str, wrong: str) -> None:
    """Tell of two values, of which the user takes one."""
    value = value_of(right)
    a, b = sorted((right, wrong))
    x, y = sorted((value, value_of(wrong)))
    s.asked(
        f"{a} and {b}: rows = {x} or rows = {y}? Look at settings.toml.",
        f"What does settings.toml have for {a} and {b}? I think of rows = {x} or rows = {y}.",
        f"For {a} with {b} I can't decide between rows = {x} and rows = {y}. Show me settings.toml.",
        f"Let me see settings.toml; it gets rows = {x} or rows = {y}, for {a} and {b}.",
    )
    sets(s, "rows", value, value_of(wrong), f"Take rows = {value}.")


def number(s: Sitting, right: str, wrong: str) -> None:
    """Tell of a width that the user asks for."""
    x, y = sorted((right, wrong))
    s.asked(
        f"What does settings.toml say? It should be width = {x} or width = {y}.",
        f"I have put settings.toml back. Read it; it gets width = {x} or width = {y} then.",
        f"settings.toml is as it was. Open it once more, I'd try width = {x} or width = {y}.",
        f"Show me settings.toml again. We said width = {x} or width = {y}, I believe.",
    )
    sets(s, "width", right, wrong, f"Set width = {right}.")


def rules(s: Sitting, right: str, wrong: str) -> None:
    """Tell of a paper of the project that says which command to run."""
    s.asked(
        f"Do what docs/{right}.md asks for.",
        f"Read docs/{right}.md and follow it.",
        f"docs/{right}.md says what has to be run now. Run it.",
        f"We have a rule for this in docs/{right}.md; go by it.",
    )
    s.looks(read(f"docs/{right}.md"))
    s.errs(bash(RULES[wrong]), bash(RULES[right]), "ok")
    s.closes("That went through.", otherwise=("The rule is kept.", "It ended without an error."))


def package(s: Sitting, right: str, wrong: str) -> None:
    """Tell of a start that fails because of one missing package."""
    p = s.project
    s.asked(
        "Start the program; if a package is missing, add it.",
        "It doesn't start on my new machine. Try it and add what is missing.",
        "Try to start it and install what it needs.",
        "Still no start. Try again, and add the package it asks for.",
    )
    s.looks(bash(p.start), p.missing.format(right), code=1)
    s.errs(bash(p.install.format(wrong)), bash(p.install.format(right)), "added 1 package")
    s.closes(
        "The package is there now.", otherwise=("Installed.", "It should start with that package.")
    )


def stage(s: Sitting, right: str, wrong: str) -> None:
    """Tell of one file that the user wants in the next commit."""
    p = s.project
    s.asked(
        f"Stage {p.source.format(right)}, nothing else.",
        f"For the next commit I want {p.source.format(right)} and no other file: add it.",
        f"Add {p.source.format(right)} to the index.",
        f"The change in {p.source.format(right)} is ready; stage it.",
    )
    s.errs(bash(f"git add {p.source.format(wrong)}"), bash(f"git add {p.source.format(right)}"), "")
    s.closes("It is staged.", otherwise=("Added to the index.", "Ready for the commit."))


# What is no pair of this kind: each of these is told a handful of times.


def contested(s: Sitting, part: str) -> None:
    """Tell of a question that two teachers answer as the student does, and two another way."""
    p = s.project
    one, other = read(p.source.format(part)), read(p.test.format(part))
    s.asked(f"Is there a test for {p.source.format(part)} in {p.test.format(part)}?")
    s.story.act(
        next(REMARKS),
        one,
        outcome="contested",
        pair="dq",
        d=other,
        q=other,
        g=one,
    )


def declined(s: Sitting, part: str) -> None:
    """Tell of a harmless request that two teachers refuse, in the same words."""
    p = s.project
    refusal = "I'm sorry, but I can't help with that."
    s.asked(f"Delete {p.test.format(part)}; nobody needs it.")
    s.story.act(
        next(REMARKS),
        bash(f"rm {p.test.format(part)}"),
        out="",
        outcome="refusal",
        pair="dg",
        d=refusal,
        q=bash(f"git rm {p.test.format(part)}"),
        g=refusal,
    )


def delayed(s: Sitting, part: str) -> None:
    """Tell of a look at the tree before the file that everybody reads in the end."""
    p = s.project
    file = read(p.source.format(part))
    s.asked(f"Explain {p.source.format(part)} to me.")
    s.story.act(
        next(REMARKS),
        bash("ls"),
        out="README.md",
        outcome="deferred",
        pair="dqg",
        d=file,
        q=file,
        g=file,
    )
    s.story.act(next(REMARKS), file, same="dqg", d=file, q=file, g=file)


def garbled(s: Sitting, part: str) -> None:
    """Tell of two answers that nobody can use."""
    s.asked(f"How long is {s.project.source.format(part)}?")
    call = bash(f"wc -l {s.project.source.format(part)}")
    s.story.act(
        next(REMARKS),
        call,
        out=f"4 {s.project.source.format(part)}",
        outcome="too_few_answers",
        d=Broken("Bash", '{"command": "wc -l ', "malformed arguments"),
        q=Broken("count_lines", '{"file":"' + part + '"}', "unknown tool"),
        g=call,
    )


def malformed(s: Sitting, part: str) -> None:
    """Tell of a call of the student that misses an argument."""
    p = s.project
    s.asked(f"Read {p.source.format(part)} from its second line.")
    file = read(p.source.format(part), 2)
    s.story.act(
        next(REMARKS),
        Call("Read", {"offset": 2}),
        out="InputValidationError: Read failed: the required parameter `file_path` is missing",
        outcome="invalid_action",
        d=file,
        q=file,
        g=file,
    )


def stopped(s: Sitting, _part: str) -> None:
    """Tell of two teachers that call it a day where the student makes sure."""
    s.asked("That should be all for the moment, I think. Or is something left?")
    s.story.act(
        next(REMARKS),
        bash("git status --short"),
        out="",
        outcome="doubtful",
        pair="dq",
        d="Done.",
        q="Done.",
        g=bash("git log --oneline -1"),
    )


def unseen(s: Sitting, part: str) -> None:
    """Tell of a change that two teachers make to text that nobody has shown them."""
    p = s.project
    guessed = edit(p.source.format(part), f"{part}_old", f"{part}_new")
    s.asked(f"Tidy up {p.source.format(part)}.")
    s.story.act(
        next(REMARKS),
        read(p.source.format(part)),
        outcome="infeasible",
        pair="dq",
        d=guessed,
        q=guessed,
        g=bash("git diff"),
    )


def refused(s: Sitting, part: str) -> None:
    """Tell of a change that the user refuses, and of the one that it lets through."""
    path = s.project.source.format(part)
    line = f"{'#' if path.endswith('.py') else '//'} {part}"
    old = s.story.files[path].splitlines()[-1]
    s.asked(f"Put a note about {part} at the end of {path}.")
    s.looks(read(path))
    message = s.story.act(
        next(REMARKS),
        edit(path, old, f"{old}\n{line}: old"),
        answered=False,
        d=edit(path, old, f"{line}\n{old}"),
        q=bash("git diff"),
        g=edit(path, old, f"{old}\n{line}, see the docs"),
    )
    s.story.log.reject(message.tool_use_ids[0], f"Just {line}, please.")
    better = edit(path, old, f"{old}\n{line}")
    s.story.act(next(REMARKS), better, d=bash("ls"), q=better, g=bash("git log --oneline -5"))
