"""The stage that sends pairs through data-juicer."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from replay_pipeline.settings import Settings
from replay_pipeline.stages.receipts import Overview, Receipt, added, hash_texts, total
from replay_pipeline.stages.sample import SAMPLE
from replay_pipeline.stages.shown import shown_below
from replay_pipeline.stages.stage import Check, Report, Stage, Task
from replay_pipeline.stages.work.markdown import bars

if TYPE_CHECKING:
    from replay_pipeline.normalize import DJNormalizer
    from replay_pipeline.stages.project import Project
    from replay_pipeline.stages.work.dedup_index import DedupIndex


def normalize_pairs(task: Task) -> Report:
    """Send the pairs of a batch through data-juicer: into `normalized_pairs` or `dropped_pairs`."""
    import pyarrow as pa

    project, batch = task.project, task.batch
    index = _dedup_index(project)
    result = normalizer_of(project).run(
        pa.concat_tables([task.read(name) for name in _tables_of_pairs(project, batch)]),
        prompts=project.prompts(batch),
        earlier=index.before(batch),
    )
    index.save(batch, result.keys)
    task.write("normalized_pairs", result.kept)
    task.write("dropped_pairs", result.dropped)
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


def _dedup_index(project: "Project") -> "DedupIndex":
    """Return the keys of the pairs that each batch has kept."""
    from replay_pipeline.stages.project import kept_fold
    from replay_pipeline.stages.work.dedup_index import DedupIndex

    normalizer = normalizer_of(project)
    return project.once(
        "dedup",
        lambda: DedupIndex(
            project.root.path / "dedup" / normalizer.recipe.sha,
            batches=project.batches,
            start=normalizer.memories,
            kept=lambda encode, decode: kept_fold(
                project, f"dedup/{normalizer.recipe.sha}", "normalized_pairs", encode, decode
            ),
        ),
    )


def _decisive(settings: Settings) -> Mapping[str, Any]:
    from replay_pipeline.normalize import load_recipe

    options = settings.normalize
    recipe = load_recipe(options.recipe, allow_operators=options.allow_operators)
    # A file counts by what it says, wherever it lies.
    return {
        "normalize.recipe": f"{recipe.name} ({recipe.sha})",
        **shown_below(settings),
    }


def _tables_of_pairs(project: "Project", batch: str) -> tuple[str, ...]:
    """Return the tables with a batch's pairs: the recorded ones, and the sampled ones if any."""
    names = ("dpo_pairs", "sampled_pairs")
    return names[: 1 + project.root.has("sampled_pairs", batch)]


def _pairs_before(project: "Project", batch: str) -> str:
    """Return a digest of the pairs of all earlier batches."""
    from replay_pipeline.stages.project import named_digests

    def add(value: str, key: str) -> str:
        digests = project.known_digests(key, _tables_of_pairs(project, key))
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
        "recipe": f"{report['recipe']} ({report['recipe_sha']})",
    }


def _checks() -> tuple[Check, ...]:
    from replay_pipeline.stages.audit import tables

    return (
        Check(name="every_pair_is_kept_or_dropped", look=tables.kept_or_dropped, is_blocking=True),
    )


NORMALIZE = Stage(
    name="normalize",
    about="The pairs that pass the data-juicer recipe; the others are kept apart with the reason.",
    version=4,
    work=normalize_pairs,
    reads=("turns", "states", "dpo_pairs", "positives", "outcomes", *SAMPLE.writes),
    writes=("normalized_pairs", "dropped_pairs"),
    settings=_decisive,
    inputs=_inputs,
    told="n_kept",
    figures=_figures,
    facts=_facts,
    checks=_checks,
    asset="normalized_pairs",
)
