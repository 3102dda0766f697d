"""The facts about a dataset: a manifest of each batch, and facts from the caller."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec
import pyarrow as pa
import pyarrow.compute

from replay_pipeline.publish import layout
from replay_pipeline.publish.splits import SPLITS, Split, joined_splits, name_sha, sides_in

pc: Any = pyarrow.compute  # makes its functions at import, unknown to type checkers
_SHORTEST = 1_024
_COUNTED = ("agreement_level", "outcome", "source", "student_model")


class TeacherFacts(TypedDict, total=False):
    """The facts about a teacher on the card."""

    name: str
    model: str
    first_answer: str
    """Date of its first answer in the dataset, such as `2026-11-01`."""
    last_answer: str
    is_distillable: bool | None
    """Whether its vendor's terms allow training on its answers. `None` if unknown."""


class CardFacts(TypedDict, total=False):
    """The facts that only the caller knows. All are optional, and other keys are ignored."""

    title: str
    license: str
    """License identifier of the Hub. Without one, it is `other`, and the card describes the terms."""
    teachers: Sequence[TeacherFacts]
    accepted_terms: Sequence[str]
    """Models used although their vendor forbids training on answers."""
    control_run: Mapping[str, Any]
    """Results of asking the students' own models again, by name."""
    pushes_client_texts: bool
    """Whether the texts of clients, which belong to their makers, also go to the Hub."""
    notes: str
    url: str
    """Address of a page that describes the software or the project."""
    ingest: Mapping[str, Mapping[str, Any]]
    """Reports of a stage by batch, from the pipeline's receipts."""
    replay: Mapping[str, Mapping[str, Any]]
    pairs: Mapping[str, Mapping[str, Any]]
    normalize: Mapping[str, Mapping[str, Any]]


_GENERAL = (
    "title",
    "license",
    "teachers",
    "accepted_terms",
    "pushes_client_texts",
    "control_run",
    "notes",
    "url",
)
STAGE_FACTS = {
    "ingest": ("n_sessions", "n_turns", "n_states"),
    "replay": (
        "n_answers",
        "n_rehearsed",
        "n_failed",
        "spent_usd",
        "cost_by_teacher_usd",
        "errors",
    ),
    "pairs": (
        "n_consensus",
        "n_agreement",
        "n_pairs",
        "outcomes",
        "poll",
        "teachers",
        "reliability",
    ),
    "normalize": ("recipe", "n_in", "n_kept", "dropped", "length_bias"),
}
"""The fields of each stage's report that are published."""


def general_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that hold for the whole dataset."""
    return {name: facts[name] for name in _GENERAL if name in facts}


def stage_facts(facts: Mapping[str, Any], batch: str) -> dict[str, Any]:
    """Return the stages' facts about a batch, without those that change from run to run."""
    stages = {}
    for stage, names in STAGE_FACTS.items():
        report = facts.get(stage, {}).get(batch)
        if report:
            stages[stage] = {name: report[name] for name in names if name in report}
    return stages


@dataclass(frozen=True, slots=True)
class Retracted:
    """Sessions (by hash) and batches that must not be published again."""

    sessions: frozenset[str] = frozenset()
    batches: frozenset[str] = frozenset()

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Retracted":
        """Read the retractions from the dataset's facts."""
        noted = facts.get("retracted", {})
        return cls(frozenset(noted.get("sessions", ())), frozenset(noted.get("batches", ())))

    def facts(self) -> dict[str, Any]:
        """Return the retractions in the form of facts."""
        return {"retracted": {"sessions": sorted(self.sessions), "batches": sorted(self.batches)}}

    def without(self, table: pa.Table) -> pa.Table:
        """Return the rows of a table without retracted ones."""
        if not self.sessions:
            return table
        pairs = zip(table["session_id"].to_pylist(), table["state_id"].to_pylist(), strict=True)
        stays = [name_sha(session or state) not in self.sessions for session, state in pairs]
        return table.filter(pa.array(stays, pa.bool_()))


def merge_facts(there: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return new facts merged over the old ones. Retractions and known splits stay."""
    one, other = Retracted.of(there), Retracted.of(new)
    both = Retracted(one.sessions | other.sessions, one.batches | other.batches)
    merged = {**there, **new}
    merged |= both.facts() if both != Retracted() else {}
    sides = joined_splits(*(sides_in(facts.get(_SIDES, {})) for facts in (there, new)))
    return merged | ({_SIDES: _by_side(sides)} if sides else {})


_SIDES = "earlier_sides"


def known_sides(
    manifests: Iterable[Mapping[str, Any]], facts: Mapping[str, Any]
) -> dict[str, Split]:
    """Return the split of every conversation ever published, and of its shared messages, by hash."""
    published = (
        sides_in(manifest.get(name, {}))
        for manifest in manifests
        for name in ("conversations", "ties")
    )
    return joined_splits(*published, sides_in(facts.get(_SIDES, {})))


def side_facts(
    sides: Mapping[str, Split], manifests: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return, as facts, the splits that no manifest contains.

    Args:
        sides: splits of conversations and of what they share, by hash.
        manifests: manifests of the dataset.
    """
    told = known_sides(manifests, {})
    gone = {sha: side for sha, side in sides.items() if sha not in told}
    return {_SIDES: _by_side(gone)} if gone else {}


def n_with_message(manifests: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Return the number of published conversations that have each message or project, by hash."""
    return Counter(
        sha for manifest in manifests for shas in manifest.get("ties", {}).values() for sha in shas
    )


def _by_side(sides: Mapping[str, Split]) -> dict[str, list[str]]:
    return {side: sorted(sha for sha, each in sides.items() if each == side) for side in SPLITS}


class Summed:
    """Running sums over the pairs of a batch."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in _COUNTED}
        self.teachers: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()
        self.n_bytes: Counter[str] = Counter()
        self.sample: dict[str, Any] | None = None
        """Last prompt message and sides of the row with the first state id, in any row order."""
        self._first: str | None = None
        self.tokens: dict[str, Counter[str]] = {}
        """Pairs of each config by the power of two, in tokens, that they fit into."""
        self.longest: dict[str, int] = {}

    def measure(self, config: str, pairs: pa.Table) -> None:
        """Count the lengths of a config's pairs."""
        lengths = pairs["n_tokens"].to_pylist()
        counts = self.tokens.setdefault(config, Counter())
        counts.update(str(max(_SHORTEST, 1 << (n - 1).bit_length())) for n in lengths)
        self.longest[config] = max([self.longest.get(config, 0), *lengths])

    def add(self, pairs: pa.Table) -> None:
        """Count rows of the config `pairs`."""
        for name, counts in self.counts.items():
            counts.update("none" if v is None else str(v) for v in pairs[name].to_pylist())
        self.teachers.update(pc.list_flatten(pairs["teachers_agreeing"]).to_pylist())
        self.totals["n_pairs"] += len(pairs)
        self.totals["n_distillable"] += pc.sum(pairs["is_distillable"]).as_py() or 0
        self.totals["n_sharing_vendor"] += pc.sum(pairs["shares_vendor"]).as_py() or 0
        self.totals["n_hints"] += len(pairs) - pairs["hint"].null_count
        for side in ("chosen", "rejected"):
            messages = pc.list_flatten(pairs[side]).to_pylist()
            self.n_bytes[side] += sum(len(layout.json_of(m).encode()) for m in messages)
        first = pc.min(pairs["state_id"]).as_py()
        if first is not None and (self._first is None or first < self._first):
            row = pairs.slice(pc.index(pairs["state_id"], first).as_py(), 1).to_pylist()[0]
            shown = {n: row[n][-1] for n in ("prompt", "chosen", "rejected") if row[n]}
            self.sample = {name: layout.json_of(message) for name, message in shown.items()}
            self._first = first


def manifest_of(
    batch: str,
    *,
    files: Mapping[str, Mapping[str, Mapping[str, int]]],
    pairs: Summed,
    n_positives: int,
    members: Mapping[str, Mapping[str, Sequence[str]]],
    test_fraction: float,
    stages: Mapping[str, Any],
    not_cut: Mapping[str, Mapping[str, int]],
) -> dict[str, Any]:
    """Return the facts of one batch: its files with row counts, and sums that can be added over batches.

    Args:
        batch: its key.
        files: rows by config, split and file.
        pairs: counts of its pairs.
        n_positives: number of rows of `positives`.
        members: hashes of its `sessions`, its `conversations`, and what these share (`ties`), by
            split.
        test_fraction: share of new conversations for the test split.
        stages: the stages' facts about the batch.
        not_cut: number of pairs too long for a cut config, by config and reason.
    """
    totals = ("n_pairs", "n_distillable", "n_sharing_vendor", "n_hints")
    return {
        "trace_batch": batch,
        "test_fraction": test_fraction,
        "files": files,
        "sessions": members["sessions"],
        "conversations": members["conversations"],
        **({"ties": members["ties"]} if any(members["ties"].values()) else {}),
        "counts": {name: dict(sorted(counts.items())) for name, counts in pairs.counts.items()},
        "teachers_agreeing": dict(sorted(pairs.teachers.items())),
        **{name: pairs.totals[name] for name in totals},
        "n_positives": n_positives,
        "n_bytes": {side: pairs.n_bytes[side] for side in ("chosen", "rejected")},
        "stages": stages,
        "sample": pairs.sample,
        "layout": layout.VERSION,
        "tokens": {
            "pairs": {name: dict(sorted(n.items())) for name, n in sorted(pairs.tokens.items())},
            "longest": dict(sorted(pairs.longest.items())),
            "not_cut": {name: dict(sorted(n.items())) for name, n in sorted(not_cut.items())},
        },
    }


def encode(facts: Any) -> bytes:
    """Return facts as the bytes of a JSON file. Equal facts give equal bytes."""
    # `json` writes indented text a token at a time, in Python and three times as slowly.
    text = json.dumps(facts, sort_keys=True, ensure_ascii=False).encode()
    return msgspec.json.format(text, indent=1) + b"\n"


def content_digest(manifests: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the hash of the dataset's whole content: that of `encode(manifests)`."""
    if not manifests:
        return hashlib.sha256(encode({})).hexdigest()[:12]
    digest = hashlib.sha256()
    # One by one: the text of ten thousand manifests would be the largest thing in memory.
    for n, key in enumerate(sorted(manifests)):
        digest.update(b"," if n else b"{")
        digest.update(encode({key: manifests[key]})[len("{") : -len("\n}\n")])
    digest.update(b"\n}\n")
    return digest.hexdigest()[:12]


def session_hashes(manifest: Mapping[str, Any], name: str = "sessions") -> list[str]:
    """Return the hashes of a batch's sessions or conversations."""
    return [sha for side in SPLITS for sha in manifest[name][side]]


def rows_by_split(manifests: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the number of rows of each config and split, over all batches."""
    return {
        config: {
            split: sum(
                sum(manifest["files"].get(config, {}).get(split, {}).values())
                for manifest in manifests.values()
            )
            for split in SPLITS
        }
        for config in layout.configs_of(manifests.values())
    }
