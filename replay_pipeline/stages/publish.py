"""The stage that publishes all normalized pairs as one dataset, and later changes to that dataset."""

import gc
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from replay_pipeline.errors import ConfigError
from replay_pipeline.settings import Settings
from replay_pipeline.stages.audit.tables import refuse_unfit
from replay_pipeline.stages.ingest import INGEST
from replay_pipeline.stages.normalize import NORMALIZE
from replay_pipeline.stages.pairs import PAIRS
from replay_pipeline.stages.receipts import ALL, FOLDER, Overview, Receipt, hash_texts
from replay_pipeline.stages.shown import shown_below
from replay_pipeline.stages.stage import Report, Stage, Task
from replay_pipeline.stages.work.markdown import Location, Markdown, bars
from replay_pipeline.storage.folds import Fold
from replay_pipeline.storage.store import files_below
from replay_pipeline.types import TraceState

if TYPE_CHECKING:
    from replay_pipeline.publish import PublishReport
    from replay_pipeline.stages.project import Project

_CONTROL_RUN = "the control run"
"""What the dataset card tells that no batch has reported, and no setting says."""


def publish_dataset(task: Task) -> Report:
    """Publish all normalized pairs to one dataset folder, and to the Hub if a repository is set.

    Raises:
        ConfigError: there is nothing to publish yet.
        SecretFoundError: a secret is in the data. Nothing was published.
        CheckFailedError: a batch fails a check, or was redacted by older rules. Nothing was
            published.
        PublishError: the Hub refused.
    """
    from replay_pipeline.publish import publish, to_be_published
    from replay_pipeline.stages.audit.dataset import refuse_unfit_dataset
    from replay_pipeline.stages.staleness import refuse_stale

    project, options = task.project, task.project.settings.publish
    place, new = project.settings.dataset_dir(), _changed_batches(task)
    refuse_stale(project, task.chain, set(new))
    refuse_unfit(project.root, new)
    checks: dict[str, str] = {}

    def look(folder: Path) -> None:
        checks.update(refuse_unfit_dataset(folder))

    with to_be_published(place, dataset_copy(project)) as folder:
        report = publish(
            ((batch, project.root.read("normalized_pairs", batch)) for batch in new),
            positives=((batch, project.root.read("normalized_positives", batch)) for batch in new),
            prompts=partial(project.prompts, is_neutral=True),
            folder=folder,
            repo_id=options.repo_id,
            private=options.is_private,
            test_fraction=options.test_fraction,
            messages=partial(_long_messages, project),
            look=look,
            card_facts=_card_facts(project, new),
            lengths=options.lengths,
        )
        if not checks:  # it had nothing new
            look(folder)
    elsewhere = {} if options.folder is None else {FOLDER: str(place.absolute())}
    task.outputs["dataset"] = digest_of_shards(project)
    return {**report.to_json(), "checks": checks, **elsewhere}


def dataset_copy(project: "Project") -> Path:
    """Return the working copy of a dataset on an object store, or the dataset's own folder."""
    place = project.settings.dataset_dir()
    return place if isinstance(place, Path) else project.settings.local_dir() / "dataset"


def _changed_batches(task: Task) -> list[str]:
    """Return the batches that are not in the dataset as they would be published now."""
    batches = task.project.batches_with("normalized_pairs")
    last, changes = task.last, task.changes
    if last is None or changes.version or changes.settings:
        return batches
    if not _is_there(task.project, last):
        return batches
    return [batch for batch in batches if batch in changes.inputs]


def _long_messages(project: "Project", batch: str) -> dict[str, set[str]]:
    """Return hashes of the long messages that people typed, by conversation."""
    columns = ["conversation", "kind", "messages_json"]
    found: dict[str, set[str]] = {}
    for row in project.root.read("turns", batch, columns=columns).to_pylist():
        if row["kind"] != "user" or len(row["messages_json"]) < _LONG_CHARS:
            continue
        for message in json.loads(row["messages_json"]):
            if len(text := message["content"].strip()) >= _LONG_CHARS:
                found.setdefault(row["conversation"], set()).add(hash_texts([text]))
    return found


_LONG_CHARS = 200
"""As in the check `splits_share_no_prompt`."""


def _decisive(settings: Settings) -> Mapping[str, Any]:
    """Return the settings that decide what is in the files, and neither where they lie nor who sees them."""
    options = settings.publish
    told = options.model_dump(mode="json", exclude={"folder", "repo_id", "is_private"})
    return {"publish": told, **shown_below(settings), **_on_the_card(settings)}


def _on_the_card(settings: Settings) -> Mapping[str, Any]:
    """Return what the card says of the settings of other stages."""
    teachers = {
        f"replay.teachers.{teacher.name}": {
            "model": teacher.model,
            "is_distillable": teacher.is_distillable,
        }
        for teacher in settings.teachers()
    }
    return {
        "replay.teachers": [teacher.name for teacher in settings.teachers()],
        "replay.accepted_terms": settings.replay.accepted_terms,
        "replay.played": settings.played,
        **teachers,
    }


def _inputs(project: "Project", _: str) -> Mapping[str, str]:
    """Digest what decides what is published, by batch, and the card."""
    # The pipelines of earlier steps refer to themselves, and hold what they knew of each batch.
    gc.collect()
    pa.default_memory_pool().release_unused()
    batches = project.batches_with("normalized_pairs")
    facts = _card_facts(project, batches)
    project.forget()
    found = {batch: _digest(project, batch, facts) for batch in batches}
    control_run = json.dumps(facts.get("control_run"), sort_keys=True, default=str)
    return {**found, _CONTROL_RUN: hash_texts([control_run])}


def _digest(project: "Project", batch: str, facts: Mapping[str, Any]) -> str:
    """Digest what decides what is published of a batch, beside the settings."""
    from replay_pipeline.publish.batch_facts import stage_facts
    from replay_pipeline.stages.project import named_digests

    def add(value: str, key: str) -> str:
        return hash_texts([value, *named_digests(project.known_digests(key, ["tools"]))])

    tables = [name for name in PUBLISH.reads if name != "sessions"]
    return hash_texts([
        json.dumps({k: d for k, d in project.known_digests(batch, tables).items() if d != "-"}),
        project.once("tools seen", lambda: Fold(project.batches, start=str, add=add)).before(batch),
        json.dumps(stage_facts(facts, batch), sort_keys=True, default=str),
    ])  # fmt: skip


def _card_facts(project: "Project", batches: Collection[str]) -> dict[str, Any]:
    """Return what the dataset card tells beyond the rows: teachers, and what stages reported of these batches."""
    from replay_pipeline.publish.batch_facts import STAGE_FACTS

    settings, receipts = project.settings, project.receipts
    facts: dict[str, Any] = {
        "teachers": [
            {"name": t.name, "model": t.model, "is_distillable": t.is_distillable}
            for t in settings.teachers()
        ],
        "accepted_terms": settings.replay.accepted_terms,
    }
    for stage, names in STAGE_FACTS.items():
        reports = receipts.reports(stage, names=names)
        facts[stage] = {batch: reports[batch] for batch in batches if batch in reports}
    if control_run := receipts.read("control", "all"):
        facts["control_run"] = control_run.report
    if settings.played == "sample":
        facts["notes"] = (
            "Made from the bundled sample: its sessions and answers were written for it, and "
            "the answers were not produced by the models they name."
        )
    return facts


def digest_of_shards(project: "Project") -> str:
    """Return a digest of the names of the dataset's shards, which contain their own digests."""
    names = files_below(project.place_of("dataset"))
    return hash_texts(sorted(name for name in names if name.endswith(".parquet")))


def _is_there(project: "Project", receipt: Receipt) -> bool:
    """Return whether the dataset that a receipt is of lies where it is to be, whatever its folder is called."""
    if project.settings.publish.repo_id not in (None, receipt.report.get("repo_id")):
        return False
    from replay_pipeline.publish.layout import CARD

    has_card = project.place_of(f"dataset/{CARD}").exists()
    return has_card and digest_of_shards(project) == receipt.outputs.get("dataset")


def retract_rows(
    project: "Project",
    *,
    session_ids: Sequence[str] = (),
    batches: Sequence[str] = (),
    erase: bool = False,
) -> "PublishReport":
    """Remove sessions or batches from the published dataset for good.

    They are never published again. The pipeline's own tables keep them.

    Raises:
        ConfigError: no session or batch is named, or there is no dataset.
        PublishError: the Hub refused. The folder has the new version, the Hub the old one.
    """
    from replay_pipeline.publish import retract, to_be_published

    place = project.settings.dataset_dir()
    if not (session_ids or batches):
        raise ConfigError("nothing to retract: name a session or a batch (--session, --batch)")
    if not place.exists():
        raise ConfigError(f"{place}: no dataset yet, so there is nothing to retract")
    with to_be_published(place, dataset_copy(project)) as folder:
        report = retract(
            folder=folder,
            session_ids=session_ids,
            batches=batches,
            repo_id=project.settings.publish.repo_id,
            erase=erase,
        )
    if last := project.receipts.read(PUBLISH.name, ALL):
        outputs = {"dataset": digest_of_shards(project)}
        project.receipts.write(replace(last, outputs=outputs), at=last.at)
    return report


def published_rows(project: "Project", batch: str, state: TraceState) -> Mapping[str, Any]:
    """Return a state's rows in the dataset, by config and split."""
    from replay_pipeline.publish.layout import DATA

    place, found = project.place_of("dataset") / DATA, dict[str, Any]()
    for name in files_below(place):
        if name.endswith(".parquet") and f"/{batch}/" in name:
            rows = pq.read_table(pa.BufferReader((place / name).read_bytes()))
            if rows := rows.filter(pc.field("state_id") == state["state_id"]).to_pylist():
                found["/".join(name.split("/")[:2])] = rows
    return found


def _figures(receipts: Sequence[Receipt]) -> Mapping[str, Any]:
    report = receipts[-1].report if receipts else {}
    return {name: report.get(name, {}) for name in ("rows_by_split", "checks")}


def _facts(project: Overview, receipt: Receipt) -> Mapping[str, Any]:
    from replay_pipeline.publish import in_words
    from replay_pipeline.publish.layout import CARD

    by_config = receipt.report["rows_by_split"]
    folder = str(project.settings.dataset_dir().absolute())
    repo_id = project.settings.publish.repo_id
    code = f"from datasets import load_dataset\n\npairs = load_dataset({repo_id or folder!r})"
    facts = {
        "dagster/row_count": sum(by_config.get("pairs", {}).values()),
        "dagster/uri": folder,
        "batches": len(receipt.inputs) - 1,
        **{
            f"{config} {split}": n
            for config, splits in sorted(by_config.items())
            for split, n in sorted(splits.items())
        },
        "prompt-blind control": in_words(receipt.report.get("blind")),
        "rows": bars(by_config.get("pairs", {})),
        "load": Markdown(f"```python\n{code}\n```"),
        "card": Location(f"{folder}/{CARD}"),
    }
    if repo_id is not None:
        facts["hub"] = f"https://huggingface.co/datasets/{repo_id}"
    return facts


PUBLISH = Stage(
    name="publish",
    about="All normalized pairs as one dataset that `datasets.load_dataset` opens.",
    version=12,
    work=publish_dataset,
    reads=(*INGEST.writes, *PAIRS.writes, *NORMALIZE.writes),
    settings=_decisive,
    inputs=_inputs,
    is_done=_is_there,
    figures=_figures,
    facts=_facts,
    trace=published_rows,
    asset="published_dataset",
)
