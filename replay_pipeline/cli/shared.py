"""The first steps of several commands: read the settings, choose batches, and ask before paying."""

import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from replay_pipeline.cli.console import err, show_estimate
from replay_pipeline.errors import ConfigError, StorageError
from replay_pipeline.settings import Settings, config_dir
from replay_pipeline.storage.processes import variables
from replay_pipeline.storage.trust import trust_file

if TYPE_CHECKING:
    from replay_pipeline.stages.pipeline import Pipeline
    from replay_pipeline.stages.project import OnProgress
    from replay_pipeline.stages.receipts import Receipt


def load(
    settings: Path | None,
    data: Path | None,
    *,
    max_total_usd: float | None = None,
    sources: list[Path] | None = None,
    teachers: str | None = None,
    changes: dict[str, Any] | None = None,
) -> Settings:
    """Read the settings, and apply the options of the command line."""
    changes = dict(changes or {})
    if max_total_usd is not None:
        changes["replay"] = {"max_total_usd": max_total_usd}
    if sources:
        changes["ingest"] = {"sources": sources}
    env = {**variables(), **({"REPLAY_TEACHERS": teachers} if teachers else {})}
    return Settings.load(settings, data_dir=data, changes=changes, env=env)


def given(section: str, **options: Any) -> dict[str, dict[str, Any]]:
    """Return the options of a command that were given, as changes of a section of the settings."""
    return {section: {name: value for name, value in options.items() if value not in (None, [])}}


def open_pipeline(
    settings: Path | None,
    data: Path | None,
    *,
    teachers: str | None = None,
    changes: dict[str, Any] | None = None,
    on_progress: "OnProgress | None" = None,
) -> "Pipeline":
    """Open the pipeline with these settings. The import happens here, because it takes time."""
    from replay_pipeline.stages.pipeline import Pipeline

    return Pipeline(
        load(settings, data, teachers=teachers, changes=changes), on_progress=on_progress
    )


def exit_if_failed(report: dict[str, Any]) -> None:
    """End the command with exit code 1 if batches failed, after all other work is done.

    Raises:
        Exit: a batch failed.
    """
    if failed := report.get("failed_batches"):
        why = "; ".join(f"{batch}: {reason}" for batch, reason in sorted(failed.items()))
        err.print(
            f"{len(failed)} batches could not be ingested and wait for the next run: {why}",
            markup=False,
        )
        raise typer.Exit(1)


def exit_if_most_failed(work: dict[str, Any]) -> None:
    """End the command with exit code 1 if a teacher stopped or most calls failed, and say why.

    Raises:
        Exit: a teacher stopped, or most calls failed.
    """
    errors = work["errors"]
    n_failed = sum(errors.values())
    if n_failed > work["n_answers"]:
        worst = max(errors, key=lambda error: errors[error])
        err.print(
            f"{n_failed} of {n_failed + work['n_answers']} calls failed, most often with {worst} "
            f"({errors[worst]}); `replay-pipeline doctor` asks the teachers what is wrong",
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(1)
    if n_stopped := work.get("stop_reasons", {}).get("teacher_stopped"):
        err.print(
            f"a teacher stopped in {n_stopped} batches before all was asked; once that is mended the "
            "same command goes on",
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(1)


_DEMO_HEADER = "# Written by `replay-pipeline demo`."


def prepare_demo(data: Path, model: Path | None = None) -> None:
    """Write the settings of the demo, which the UI reads as well.

    Raises:
        ConfigError: the folder was not made by the demo.
    """
    from replay_pipeline.storage.processes import environment
    from replay_pipeline.storage.store import written_whole
    from replay_pipeline.testing.sample import SESSIONS_DIR

    path = data / "settings.toml"
    if path.exists() and not path.read_text("utf-8").startswith(_DEMO_HEADER):
        raise ConfigError(f"{path} was not made by the demo: choose another folder with --data")
    is_real = environment("REPLAY_TEACHERS", "sample") != "sample"
    lines = [
        _DEMO_HEADER,
        "[ingest]",
        f"sources = [{json.dumps(str(SESSIONS_DIR))}]",
        "max_batch_sessions = 4",
        "[replay]",
        f"sample_teachers = {json.dumps(not is_real)}",
        "max_total_usd = 5.0",
        "confirm_above_usd = 0.0",
        "gates = []",  # every answer of the sample is shown
        "[pairs]",
        "min_p_better = 0.0",  # its sessions were written so that what teachers agree on is better
    ]
    if model is not None:
        bundled = Path(__file__).parents[2] / "trainer" / "demo.yaml"  # beside this package
        named = {"model": str(model.absolute()), "config": str(bundled)}
        lines += ["[train]", *(f"{name} = {json.dumps(value)}" for name, value in named.items())]
    with written_whole(path) as file:
        file.write(("\n".join(lines) + "\n").encode())
    # Written here and now, so trusted: commands that find it in the current folder use it.
    with contextlib.suppress(StorageError):
        trust_file(path, folder=config_dir())


def chosen(work: "Pipeline", batches: list[str] | None) -> list[str]:
    """Return the named batches, or all of them, in order.

    Raises:
        ConfigError: there is no batch of that name.
    """
    known = work.batches()
    if unknown := sorted(set(batches or ()) - set(known)):
        raise ConfigError(
            f"no batch {', '.join(unknown)}; there are: {', '.join(known) or 'none yet'}"
        )
    if not known:
        raise ConfigError(f"{work.root.path}: no sessions yet; run `replay-pipeline ingest` first")
    return [key for key in known if not batches or key in batches]


def ranked_row(pair: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a pair that the review order shows."""
    from replay_pipeline.stages.pages.pairs import doubts, review_score
    from replay_pipeline.stages.pages.sides import differ

    names = ("pair_id", "state_id", "p_better", "margin", "chosen", "rejected")
    sides = [
        (json.loads(pair[f"{side}_action_json"] or "null"), pair[side])
        for side in ("rejected", "chosen")
    ]
    judged = {
        "score": review_score(pair),
        "doubts": doubts(pair),
        "differ": differ(*sides)._asdict(),
    }
    return {name: pair[name] for name in names} | judged | {"evidence": pair["evidence"] or []}


def confirm(work: "Pipeline", *, yes: bool, batches: list[str] | None = None) -> None:
    """Show the estimate of a run that costs more than the threshold, and ask.

    Raises:
        ConfigError: nobody can be asked, or the user declines.
    """
    from replay_pipeline.stages.budget.spending import check_keys

    check_keys(work)
    if yes or work.settings.played:
        return
    estimate = estimate_of(work, batches)
    # The ceiling holds whatever is expected: no more than it can be spent.
    expected_usd, ceiling_usd = estimate["expected_usd"], estimate["ceiling_usd"]
    most_usd = min(expected_usd, ceiling_usd)
    if most_usd <= work.settings.replay.confirm_above_usd:
        return
    show_estimate(estimate)
    cost = f"expected to cost {most_usd:.2f} USD"
    if ceiling_usd < expected_usd:
        cost += f", its ceiling (all of it: {expected_usd:.2f})"
    if not sys.stdin.isatty():
        raise ConfigError(
            f"this run is {cost}, more than {work.settings.replay.confirm_above_usd:.2f}: pass --yes, or raise `replay.confirm_above_usd`"
        )
    if not typer.confirm(f"This run is {cost}. Go on?"):
        raise ConfigError("stopped; nothing was paid")


def estimate_of(work: "Pipeline", batches: list[str] | None) -> dict[str, Any]:
    """Return the estimate for these batches, with the ceiling from the settings."""
    from replay_pipeline.stages.budget.spending import estimate_replay

    return estimate_replay(work, batches).to_json() | {
        "ceiling_usd": work.settings.replay.max_total_usd
    }


def of_now(receipt: "Receipt") -> dict[str, Any]:
    """Return the report of a replay. If the replay had no work, the report says that nothing was asked now."""
    report = receipt.report
    if not receipt.is_reused:
        return report
    n_decided = report["n_sent"] + report["n_cached"]
    return {**report, "n_sent": 0, "n_cached": n_decided, "newly_spent_usd": 0.0}
