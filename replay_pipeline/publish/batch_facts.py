"""The facts about a dataset: what its manifests add up to, and what the caller tells."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec
import pyarrow as pa

from replay_pipeline.publish import layout
from replay_pipeline.publish.splits import SPLITS, Split, joined_splits, name_sha, sides_in


class CardFacts(TypedDict, total=False):
    """The facts that only the caller knows. All are optional, and other keys are ignored."""

    title: str
    license: str
    """License identifier of the Hub. Without one, it is `other`, and the card describes the terms."""
    teachers: Sequence[Mapping[str, Any]]
    """Of each its `name`, `model`, and whether it `is_distillable`, if that is known."""
    accepted_terms: Sequence[str]
    """Models used although their vendor forbids training on answers."""
    control_run: Mapping[str, Any]
    """Results of asking the agents' own models again, by name."""
    notes: str
    ingest: Mapping[str, Mapping[str, Any]]
    """Reports of a stage by batch, from the pipeline's receipts."""
    replay: Mapping[str, Mapping[str, Any]]
    pairs: Mapping[str, Mapping[str, Any]]
    normalize: Mapping[str, Mapping[str, Any]]


STAGE_FACTS = {
    "ingest": ("n_sessions", "n_turns", "n_states"),
    "replay": (
        "n_answers", "n_rehearsed", "n_failed", "spent_usd", "cost_by_teacher_usd", "errors",
    ),
    "pairs": (
        "n_consensus", "n_agreement", "n_lessons", "n_answers", "n_pairs", "outcomes", "poll",
        "teachers", "reliability",
    ),
    "normalize": ("recipe", "n_in", "n_kept", "dropped", "length_bias"),
}  # fmt: skip
"""The fields of each stage's report that are published."""


def general_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that hold for the whole dataset."""
    general = CardFacts.__annotations__.keys() - STAGE_FACTS.keys()
    return {name: facts[name] for name in facts if name in general}


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
    """Return, as facts, the splits that no manifest contains."""
    told = known_sides(manifests, {})
    gone = {sha: side for sha, side in sides.items() if sha not in told}
    return {_SIDES: _by_side(gone)} if gone else {}


def n_with_message(manifests: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Return the number of published conversations that have each message, by hash."""
    return Counter(
        sha for manifest in manifests for shas in manifest.get("ties", {}).values() for sha in shas
    )


def _by_side(sides: Mapping[str, Split]) -> dict[str, list[str]]:
    return {side: sorted(sha for sha, each in sides.items() if each == side) for side in SPLITS}


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
