"""Checks of the published dataset folder, read with the same tools as a user of the dataset."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq

from replay_pipeline.errors import CheckFailedError
from replay_pipeline.publish import in_words, layout
from replay_pipeline.publish.batch_facts import rows_by_split
from replay_pipeline.publish.blind import WARN_ABOVE
from replay_pipeline.publish.loading import problems_of_loading
from replay_pipeline.publish.version import read_manifests
from replay_pipeline.redaction.redactor import find_secrets_in
from replay_pipeline.stages.audit import AuditResult
from replay_pipeline.stages.audit.held_out import shared_conversations, shared_messages
from replay_pipeline.storage.store import Place, copy_files, files_below
from replay_pipeline.storage.tables import readable

_SCANNED_AT_ONCE = 2_000


def loaded(folder: Place) -> AuditResult:
    """Does `datasets.load_dataset` open every config and split, as a whole and as a stream?"""
    with TemporaryDirectory(prefix="published-") as name:
        here = folder if isinstance(folder, Path) else Path(name)
        if here is not folder:
            copy_files(folder, here, files_below(folder))
        found = problems_of_loading(here, rows_by_split(read_manifests(here)))
    if found is None:
        return AuditResult(
            facts={"looked_at": "nothing: pip install 'replay-pipeline[publish]'"}, judged=0
        )
    problems, n_rows = found
    return AuditResult(
        problems=problems,
        what_to_do="Nobody could use it. If a file was changed by hand, publish again; if not, see "
        "which version of `datasets` is installed: 5 is what this was tried with.",
        facts={"rows": n_rows},
        judged=n_rows,
    )


BLOCKING: Mapping[str, Callable[[Place], AuditResult]] = {
    "splits_share_no_conversation": shared_conversations,
    "splits_share_no_prompt": shared_messages,
    "dataset_loads": loaded,
}
"""The checks that a new dataset must pass before it replaces the previous one, by name."""


def refuse_unfit_dataset(folder: Place) -> dict[str, str]:
    """Return the verdict of each blocking check, in words.

    Raises:
        CheckFailedError: a check fails.
    """
    told: dict[str, str] = {}
    for name, look in BLOCKING.items():
        verdict = look(folder)
        if not verdict.holds:
            raise CheckFailedError(f"nothing was published. {name}: {verdict.message()}")
        told[name] = verdict.message() or f"holds ({verdict.judged} looked at)"
    return told


def published_secrets(folder: Place) -> AuditResult:
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
    return AuditResult(
        problems=problems,
        what_to_do="Make the repository private at once, revoke the secret, take its session out "
        "with `replay_pipeline.publish.retract(..., erase=True)`, and ingest it again.",
        facts={"secrets": len(problems), "texts_scanned": n_texts},
        judged=n_texts,
    )


def prompts_decide(folder: Place) -> AuditResult:
    """Check that it takes the prompt to tell which side of a pair was chosen."""
    path = folder / layout.FACTS
    facts = json.loads(path.read_text("utf-8")) if path.exists() else {}
    blind = facts.get("blind_control") or {}
    shown = {name: n for name, n in blind.items() if name.startswith(("ngrams", "length", "tools"))}
    return AuditResult(
        problems=[in_words(blind)] if max(shown.values(), default=0.0) > WARN_ABOVE else [],
        what_to_do="Look at the pairs for words, lengths or tools that only one side has, and "
        "judge a trained model by its accuracy with the true prompt minus that with a blank one.",
        facts=blind,
        is_warning=True,
        judged=blind.get("n_pairs", len(blind)),
    )


def shards_against_manifests(folder: Place) -> AuditResult:
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
    return AuditResult(
        problems=problems,
        what_to_do="Somebody changed the folder by hand, or a copy of it was cut short: publish "
        "again, which puts every file right.",
        facts={"shards": len(shards), "rows": n_rows},
        judged=len(shards),
    )


def _texts(path: Place) -> list[str]:
    """Return every text of a shard once, or the text of another file."""
    if path.suffix != ".parquet":
        return [path.read_text("utf-8", "replace")]
    table = pq.read_table(readable(path), partitioning=None)
    texts: set[str] = set()
    waiting = list(table.columns)
    while waiting:
        column = waiting.pop()
        if pa.types.is_struct(column.type):
            waiting += column.flatten()
        elif pa.types.is_list(column.type):
            inner = column.type.value_type
            waiting.append(pa.chunked_array([c.flatten() for c in column.chunks], inner))
        elif pa.types.is_string(column.type):
            texts.update(text for text in column.unique().to_pylist() if text)
    return sorted(texts)


def _counted(folder: Place) -> dict[str, int]:
    """Return rows of each shard as the manifests have them."""
    counted: dict[str, int] = {}
    for path in sorted((folder / "manifests").glob("[!_]*.json")):
        manifest = json.loads(path.read_text("utf-8"))
        for config, splits in manifest["files"].items():
            for split, files in splits.items():
                for name, n_rows in files.items():
                    where = layout.batch_dir(config, split, manifest["trace_batch"])
                    counted[f"{where}/{name}"] = n_rows
    return counted
