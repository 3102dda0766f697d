"""The stage that sends pairs and lessons through data-juicer."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from replay_pipeline.errors import StorageError
from replay_pipeline.settings import Settings
from replay_pipeline.stages.audit import tables
from replay_pipeline.stages.receipts import Overview, Receipt, added, hash_texts, total
from replay_pipeline.stages.shown import shown_below
from replay_pipeline.stages.stage import Check, Report, Stage, Task
from replay_pipeline.stages.work.markdown import bars
from replay_pipeline.storage.folds import Fold
from replay_pipeline.storage.store import Place, written_whole
from replay_pipeline.storage.tables import readable

if TYPE_CHECKING:
    from replay_pipeline.normalize import DJNormalizer
    from replay_pipeline.normalize.memory import Memory
    from replay_pipeline.stages.project import Project


def normalize_pairs(task: Task) -> Report:
    """Send the pairs and lessons of a batch through data-juicer: into the tables of what is kept, or dropped."""
    project, batch = task.project, task.batch
    result = normalizer_of(project).run(
        task.read("dpo_pairs"),
        lessons=task.read("positives"),
        prompts=project.prompts(batch),
        earlier=_keys_before(project).before(batch),
    )
    _save_keys(project, batch, result.keys)
    task.write("normalized_pairs", result.kept)
    task.write("dropped_pairs", result.dropped)
    task.write("normalized_positives", result.lessons)
    task.write("dropped_positives", result.dropped_lessons)
    return result.report.to_json()


def normalizer_of(project: "Project") -> "DJNormalizer":
    """Return the normalizer that the settings name. Loading its recipe and operators takes a moment.

    Raises:
        ConfigError: the recipe is wrong.
    """
    from replay_pipeline.normalize import DJNormalizer

    options = project.settings.normalize
    return project.once(
        "normalizer",
        lambda: DJNormalizer(
            options.recipe,
            executor=options.executor,
            ray_address=options.ray_address,
            allow_operators=options.allow_operators,
        ),
    )


def _keys_before(project: "Project") -> "Fold[dict[str, Memory]]":
    """Return what deduplicators remember of each batch's kept pairs, by step.

    There is one file per recipe and batch. A batch sees only the batches whose keys sort before its
    own. So a batch gives the same rows on every run, in any order of batches.
    """

    def with_batch(memories: "dict[str, Memory]", batch: str) -> "dict[str, Memory]":
        path = _keys_of(project, batch)
        try:
            rows = pq.ParquetFile(readable(path)).read()
        except FileNotFoundError:
            return memories
        except StorageError:
            raise
        except (OSError, pa.ArrowInvalid) as error:
            raise StorageError(
                f"{path}: not readable ({error}); delete it and normalize batch {batch} again"
            ) from error
        for step, key in zip(rows["step"].to_pylist(), rows["key"].to_pylist(), strict=True):
            memories[step].remember(key)
        return memories

    start = normalizer_of(project).memories
    return project.once("dedup", lambda: Fold(project.batches, start=start, add=with_batch))


def _keys_of(project: "Project", batch: str) -> Place:
    recipe = normalizer_of(project).recipe
    return project.root.path / "dedup" / recipe.sha / f"{batch}.parquet"


def _save_keys(project: "Project", batch: str, keys: Mapping[str, Sequence[bytes]]) -> None:
    schema = pa.schema([("step", pa.string()), ("key", pa.binary())])
    rows = [{"step": step, "key": key} for step, of_step in keys.items() for key in of_step]
    with written_whole(_keys_of(project, batch)) as file:
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), file, compression="zstd")
    _keys_before(project).forget(batch)


def _decisive(settings: Settings) -> Mapping[str, Any]:
    from replay_pipeline.normalize import load_recipe

    options = settings.normalize
    recipe = load_recipe(options.recipe, allow_operators=options.allow_operators)
    # A file counts by what it says, wherever it lies.
    return {
        "normalize.recipe": f"{recipe.name} ({recipe.sha})",
        **shown_below(settings),
    }


def _pairs_before(project: "Project", batch: str) -> str:
    """Return a digest of the pairs and lessons of all earlier batches."""
    from replay_pipeline.stages.project import named_digests

    def add(value: str, key: str) -> str:
        digests = project.known_digests(key, ["dpo_pairs", "positives"])
        return hash_texts([value, key, *named_digests(digests)])

    return project.once("pairs before", lambda: project.fold("dpo_pairs", str, add)).before(batch)


def _inputs(project: "Project", batch: str) -> Mapping[str, str]:
    return {
        **project.tools_digest(batch),
        "pairs before it": _pairs_before(project, batch),
    }


def _figures(receipts: Sequence[Receipt]) -> Mapping[str, Any]:
    return {
        "normalized_pairs": total(receipts, "n_kept"),
        "dropped": added(r.report.get("dropped", {}) for r in receipts),
    }


def _facts(_: Overview, receipt: Receipt) -> Mapping[str, Any]:
    report = receipt.report
    return {
        "dagster/partition_row_count": report["n_kept"],
        "dropped": report["n_dropped"],
        "drop_rate": report["n_dropped"] / max(1, report["n_in"]),
        **{f"dropped {name}": n for name, n in sorted(report["dropped"].items())},
        "dropped_by": bars(report["dropped"]),
        "lessons": report.get("n_lessons_kept", 0),
        "lessons_dropped_by": bars(report.get("dropped_lessons", {})),
        "recipe": f"{report['recipe']} ({report['recipe_sha']})",
    }


NORMALIZE = Stage(
    name="normalize",
    about="The pairs and lessons that pass the data-juicer recipe; the others are kept apart with the reason.",
    version=11,
    work=normalize_pairs,
    reads=("turns", "states", "dpo_pairs", "positives", "outcomes"),
    writes=("normalized_pairs", "dropped_pairs", "normalized_positives", "dropped_positives"),
    settings=_decisive,
    inputs=_inputs,
    told="n_kept",
    figures=_figures,
    facts=_facts,
    checks=(
        Check(name="every_pair_is_kept_or_dropped", look=tables.kept_or_dropped, is_blocking=True),
    ),
    asset="normalized_pairs",
)
