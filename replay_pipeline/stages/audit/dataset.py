"""The published dataset folder, read as a stranger would read it."""

import json
import random
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from replay_pipeline.publish import in_words, layout
from replay_pipeline.publish.blind import WARN_ABOVE
from replay_pipeline.redaction.redactor import find_secrets_in
from replay_pipeline.stages.audit.verdict import Verdict
from replay_pipeline.storage.store import Place, files_below
from replay_pipeline.storage.tables import readable

SIMILAR = 0.8
"""Share of common shingles from which two prompts count as nearly the same."""
_SHINGLE_WORDS = 5
_END_WORDS = 300
"""Prompts of one project share their beginnings; what differs is the end."""
_N_BANDS, _BAND_ROWS = 20, 6
_SCANNED_AT_ONCE = 2_000


def shared_sessions(folder: Place) -> Verdict:
    """Is every session in one split only?"""
    of = {split: _sessions(folder, split) for split in ("train", "test")}
    shared = sorted(of["train"] & of["test"])
    return Verdict(
        problems=[f"session {session} is in both splits" for session in shared],
        what_to_do="Held-out figures would be worthless: publish all batches again into an empty "
        "folder with one `publish.test_fraction`.",
        facts={"shared_sessions": len(shared), **{f"{k}_sessions": len(v) for k, v in of.items()}},
    )


def shared_prompts(folder: Place) -> Verdict:
    """Are the prompts of the test split unlike those of the train split?

    Compared are the word shingles of the ends of the prompts, by MinHash.
    """
    index = _PromptIndex()
    n_test = 0
    for row in _rows(folder, "pairs", "test", ("state_id", "prompt")):
        index.add(str(row["state_id"]), _end_words(row["prompt"]))
        n_test += 1
    found: dict[str, _Likeness] = {}
    for row in _rows(folder, "pairs", "train", ("state_id", "prompt")):
        for other, likeness in index.alike(_end_words(row["prompt"])):
            if likeness >= SIMILAR and likeness > found.get(other, _Likeness("", 0.0)).share:
                found[other] = _Likeness(str(row["state_id"]), likeness)
    return Verdict(
        problems=[
            f"test prompt {test} is {one.share:.0%} like train prompt {one.train_state}"
            for test, one in sorted(found.items(), key=lambda item: -item[1].share)
        ],
        what_to_do='Held-out figures look better than they are: `normalize.recipe = "strict"` '
        "drops near-duplicates, and `replay-pipeline show` tells the two states.",
        facts={"similar_test_prompts": len(found), "share_of_test": len(found) / max(1, n_test)},
        is_warning=True,
    )


def published_secrets(folder: Place) -> Verdict:
    """Is there no secret in any text of any shard, and none in the card?"""
    problems: list[str] = []
    n_texts = 0
    for name in files_below(folder):
        if not name.endswith((".parquet", ".md", ".json")):
            continue
        texts = _texts(folder / name)
        n_texts += len(texts)
        for start in range(0, len(texts), _SCANNED_AT_ONCE):
            for hits in find_secrets_in(texts[start : start + _SCANNED_AT_ONCE]):
                problems += [f"{name}: {hit.kind}" for hit in hits]
    return Verdict(
        problems=problems,
        what_to_do="Make the repository private at once, revoke the secret, take its session out "
        "with `replay_pipeline.publish.retract(..., erase=True)`, and ingest it again.",
        facts={"secrets": len(problems), "texts_scanned": n_texts},
    )


def prompts_decide(folder: Place) -> Verdict:
    """Does it take the prompt to tell which side of a pair was chosen?"""
    path = folder / layout.FACTS
    facts = json.loads(path.read_text("utf-8")) if path.exists() else {}
    blind = facts.get("blind_control") or {}
    shown = {name: n for name, n in blind.items() if name.startswith(("ngrams", "length", "tools"))}
    return Verdict(
        problems=[in_words(blind)] if max(shown.values(), default=0.0) > WARN_ABOVE else [],
        what_to_do="Look at the pairs for words, lengths or tools that only one side has, and "
        "judge a trained model by its accuracy with the true prompt minus that with a blank one.",
        facts=blind,
        is_warning=True,
    )


def shards_against_manifests(folder: Place) -> Verdict:
    """Are the files and rows those that the manifests count, with one schema per config?"""
    problems: list[str] = []
    schemas: dict[str, pa.Schema] = {}
    counted = _counted(folder)
    n_rows = 0
    shards = [name for name in files_below(folder) if name.endswith(".parquet")]
    for name in shards:
        try:
            found = pq.read_metadata(readable(folder / name))
        except (OSError, pa.ArrowInvalid) as error:
            problems.append(f"{name}: cannot be read ({str(error).splitlines()[0]})")
            counted.pop(name, None)
            continue
        n_rows += found.num_rows
        expected = counted.pop(name, None)
        if expected != found.num_rows:
            problems.append(
                f"{name}: {found.num_rows} rows, its manifest says {expected or 'none'}"
            )
        schema = found.schema.to_arrow_schema().remove_metadata()
        config = name.split("/")[1]
        if not schemas.setdefault(config, schema).equals(schema):
            problems.append(f"{name}: its columns differ from the other shards of {config}")
    problems += [f"{name}: counted in its manifest, but not there" for name in counted]
    return Verdict(
        problems=problems,
        what_to_do="Somebody changed the folder by hand, or a copy of it was cut short: publish "
        "again, which puts every file right.",
        facts={"shards": len(shards), "rows": n_rows},
    )


class _Likeness(NamedTuple):
    train_state: str
    share: float


class _PromptIndex:
    """Finds prompts by common shingles: signatures are compared when one of their bands is equal."""

    def __init__(self) -> None:
        n = _N_BANDS * _BAND_ROWS
        dice = random.Random(1)
        self._factors = np.array([dice.getrandbits(64) | 1 for _ in range(n)], np.uint64)[:, None]
        self._terms = np.array([dice.getrandbits(64) for _ in range(n)], np.uint64)[:, None]
        self._bands: list[dict[bytes, list[int]]] = [{} for _ in range(_N_BANDS)]
        self._known: list[tuple[str, np.ndarray]] = []

    def add(self, name: str, words: Sequence[str]) -> None:
        """Remember a prompt."""
        signature = self._signature(words)
        for band, part in zip(self._bands, _parts(signature), strict=True):
            band.setdefault(part, []).append(len(self._known))
        self._known.append((name, signature))

    def alike(self, words: Sequence[str]) -> Iterator[tuple[str, float]]:
        """Names of prompts that may be alike, each with its share of common shingles."""
        signature = self._signature(words)
        near = {
            number
            for band, part in zip(self._bands, _parts(signature), strict=True)
            for number in band.get(part, ())
        }
        for number in sorted(near):
            name, other = self._known[number]
            yield name, float((signature == other).mean())

    def _signature(self, words: Sequence[str]) -> np.ndarray:
        n_shingles = max(1, len(words) - _SHINGLE_WORDS + 1)
        hashes = np.array(
            [
                zlib.crc32(" ".join(words[i : i + _SHINGLE_WORDS]).encode("utf-8", "replace"))
                for i in range(n_shingles)
            ],
            np.uint64,
        )
        # Multiply-add-shift; the overflow is the modulus.
        return ((hashes * self._factors + self._terms) >> np.uint64(32)).min(axis=1)


def _parts(signature: np.ndarray) -> list[bytes]:
    return [part.tobytes() for part in signature.reshape(_N_BANDS, _BAND_ROWS)]


def _end_words(prompt: Sequence[str] | None) -> list[str]:
    """The last words of a prompt, whose messages are JSON texts."""
    words: list[str] = []
    for text in reversed(prompt or ()):
        message = json.loads(text)
        words = f"{message.get('content') or ''} {message.get('tool_calls') or ''}".split() + words
        if len(words) >= _END_WORDS:
            break
    return words[-_END_WORDS:]


def _sessions(folder: Place, split: str) -> set[str]:
    return {
        str(row["session_id"] or row["state_id"])
        for config in ("pairs", "positives")
        for row in _rows(folder, config, split, ("session_id", "state_id"))
    }


def _rows(
    folder: Place, config: str, split: str, columns: Sequence[str]
) -> Iterator[dict[str, Any]]:
    for name in files_below(folder / "data" / config / split):
        path = readable(folder / "data" / config / split / name)
        yield from pq.read_table(path, columns=list(columns), partitioning=None).to_pylist()


def _texts(path: Place) -> list[str]:
    """Every text of a shard once, or the text of another file."""
    if path.suffix != ".parquet":
        return [path.read_text("utf-8", "replace")]
    table = pq.read_table(readable(path), partitioning=None)
    texts: set[str] = set()
    for column in table.columns:
        while pa.types.is_list(column.type):
            column = pa.chunked_array(
                [chunk.flatten() for chunk in column.chunks], column.type.value_type
            )
        if pa.types.is_string(column.type):
            texts.update(text for text in column.unique().to_pylist() if text)
    return sorted(texts)


def _counted(folder: Place) -> dict[str, int]:
    """Rows of each shard as the manifests have them."""
    counted: dict[str, int] = {}
    for path in sorted((folder / "manifests").glob("[!_]*.json")):
        manifest = json.loads(path.read_text("utf-8"))
        for config, splits in manifest["files"].items():
            for split, files in splits.items():
                for name, n_rows in files.items():
                    where = f"data/{config}/{split}/trace_batch={manifest['trace_batch']}/{name}"
                    counted[where] = n_rows
    return counted
