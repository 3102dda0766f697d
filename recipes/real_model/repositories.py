"""Small repositories whose right next action is decided by the prompt, as minimal twins.

A repository has two files and one request. Its twin has the same two files with their roles
exchanged: the same two actions are possible, and the preference is turned round. So neither the
actions nor their order can give the better one away; only what the prompt says of each name can.
Names of the repositories that are tested occur in none that is trained on.
"""

import random
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

SYSTEM = """You are a coding agent. Answer with one tool call, such as
<tool_call>
{"name": "Read", "arguments": {"file_path": "README.md"}}
</tool_call>
or with the tool Bash and a command."""

Split = Literal["train", "new_repositories", "new_families"]
How = Literal["named", "described"]
HOW: tuple[How, ...] = ("named", "described")


@dataclass(frozen=True)
class Family:
    """A template: what the session shows of two names, and what is asked."""

    name: str
    how: How
    """Whether the request names the status as it is shown, or describes it in other words."""
    shown: str
    """What a command printed before the lines about the names."""
    line: str
    """With `{x}` and `{status}`."""
    wanted: str
    """Status of the name that the request is about."""
    other: str
    request: str
    verb: Literal["read", "run", "remove"]
    path: str

    def call(self, name: str) -> dict[str, Any]:
        """Return the action on one of the two names, as a message."""
        path = self.path.format(x=name)
        command = f"python {path}" if self.verb == "run" else f"rm {path}"
        function = (
            {"name": "Read", "arguments": {"file_path": path}}
            if self.verb == "read"
            else {"name": "Bash", "arguments": {"command": command}}
        )
        call = {"id": "call_1", "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}


def _families(kind: str) -> tuple[Family, ...]:
    """Make the families of the subjects in `families.toml`: either status, named or described.

    What is trained on describes one status of each subject, the first and the second in turn.
    """
    return tuple(
        Family(
            name=f"{subject['name']}, {how} {status}",
            how=how,
            shown=subject["shown"],
            line=subject["line"],
            wanted=status,
            other=subject["statuses"][1 - which],
            request=_request(subject, how, number, which),
            verb=subject["verb"],
            path=subject["path"],
        )
        for number, subject in enumerate(_SUBJECTS[kind])
        for how in HOW
        for which, status in enumerate(subject["statuses"])
        if kind == "unseen" or how == "named" or which == number % 2
    )


def _request(subject: dict[str, Any], how: How, number: int, which: int) -> str:
    if how in subject:
        return subject[how][which]
    path = subject["path"].replace("{x}", "NAME")
    templates = _SUBJECTS["named"][subject["verb"]]
    # Subjects with one verb take turns, and so do their two statuses.
    text = templates[(number + which) % len(templates)]
    text = text.replace("STATUS", subject["statuses"][which]).replace("PATH", path)
    is_told = subject["verb"] == "run" or subject["path"] in subject["line"]
    return text if is_told else f"{text} It is {path}."


_SUBJECTS = tomllib.loads(Path(__file__).with_name("families.toml").read_text("utf-8"))
TRAINED = _families("trained")
UNSEEN = _families("unseen")

TRAINED_NAMES = """
cart order price tax user login mail queue token cookie page menu form table chart graph image
audio video album track song artist city street country region parcel courier invoice ticket
coupon wallet bank loan salary budget client vendor store shelf basket search filter index report
export import backup sensor motor robot camera lamp door window garden flower forest river engine
wheel bridge tunnel station train plane ship harbor market
""".split()  # noqa: SIM905
TESTED_NAMES = """
weather recipe kitchen library museum ladder pencil paper folder letter stamp planet comet rocket
island desert mountain valley village castle tower mirror candle blanket pillow jacket button
pocket bottle butter cheese honey lemon orange carrot pepper tomato potato rabbit monkey tiger
eagle salmon turtle violin guitar piano drum dance theater cinema novel poem lesson school
""".split()  # noqa: SIM905


@dataclass(frozen=True)
class Repository:
    """Two names under one family. Its twins differ in which of them is `wanted`, and nothing else."""

    family: Family
    names: tuple[str, str]
    """In the order in which the prompt shows them."""
    split: Split
    number: int

    @property
    def calls(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The two actions, the same for both twins."""
        first, second = self.names
        return self.family.call(first), self.family.call(second)

    def prompt(self, wanted: int) -> list[dict[str, str]]:
        """Return the messages in which the name number `wanted` is the one the request is about."""
        statuses = [self.family.other, self.family.other]
        statuses[wanted] = self.family.wanted
        lines = [
            self.family.line.format(x=name, status=status)
            for name, status in zip(self.names, statuses, strict=True)
        ]
        text = "\n".join([self.family.shown, *lines, self.family.request])
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def repositories(
    n_named: int = 1, n_described: int = 4, n_new: int = 2, n_unseen: int = 3, seed: int = 0
) -> list[Repository]:
    """Draw the repositories; equal arguments give equal ones.

    Args:
        n_named: to train on, for each trained family whose requests name what is wanted.
        n_described: to train on, for each trained family whose requests describe it.
        n_new: never trained on, for each trained family.
        n_unseen: for each family that is never trained on.
        seed: of the names and their order.
    """
    draw = random.Random(seed)
    found: list[Repository] = []
    counts: tuple[tuple[Split, tuple[Family, ...], dict[How, int], list[str]], ...] = (
        ("train", TRAINED, {"named": n_named, "described": n_described}, TRAINED_NAMES),
        ("new_repositories", TRAINED, dict.fromkeys(HOW, n_new), TESTED_NAMES),
        ("new_families", UNSEEN, dict.fromkeys(HOW, n_unseen), TESTED_NAMES),
    )
    for split, families, n_of, names in counts:
        for family in families:
            seen: set[frozenset[str]] = set()
            while len(seen) < n_of[family.how]:
                first, second = draw.sample(names, 2)
                if frozenset((first, second)) not in seen:
                    seen.add(frozenset((first, second)))
                    found.append(Repository(family, (first, second), split, len(found)))
    return found
