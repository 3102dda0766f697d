"""The stage that trains on the published dataset, in its own process."""

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay_pipeline.errors import ConfigError
from replay_pipeline.settings import Settings
from replay_pipeline.stages.audit import AuditResult
from replay_pipeline.stages.publish import dataset_copy, digest_of_shards, published_rows
from replay_pipeline.stages.receipts import Overview, Receipt, hash_texts
from replay_pipeline.stages.stage import Report, Stage, Task
from replay_pipeline.stages.work.markdown import Location, sparkline
from replay_pipeline.stages.work.trainer_process import (
    TRAINER_LOCK,
    Launch,
    TrainerJob,
    run_trainer,
    training_curves,
)
from replay_pipeline.storage.processes import TRAINER, python, start_environment
from replay_pipeline.storage.store import Place, copy_files, files_below, read_files
from replay_pipeline.types import TraceState

if TYPE_CHECKING:
    from replay_pipeline.stages.project import Project


def train_model(task: Task, *, launch: Launch = run_trainer) -> Report:
    """Train a model on the published dataset, in a process that `launch` starts.

    A training that was stopped or killed continues from its last checkpoint.

    Raises:
        ConfigError: there is no dataset, or the configuration doesn't exist.
        MissingDependencyError: the trainer's packages are not installed on this machine.
        TrainError: the trainer failed; the message ends with its last words.
    """
    settings = task.project.settings
    config, model = trainer_config(settings), settings.train.model
    output, kept = settings.training_dir(), settings.model_dir()
    place = settings.dataset_dir()
    if not place.exists():
        raise ConfigError(f"{place}: no dataset yet; run `replay-pipeline publish` first")
    # The bundled run is for one core: more threads than free cores only wait for each other.
    job = TrainerJob(
        command=[*python(TRAINER, "--resume", "--again"), *_told(task.project)],
        output=output,
        environment={} if config or model else {"OMP_NUM_THREADS": "1"},
        variables=settings.train.environment,
        stop_timeout_s=settings.train.stop_timeout_s,
    )
    launch(job, task.project.on_progress)
    report = json.loads((output / "report.json").read_text("utf-8"))
    if kept != output:
        copy_files(output, kept, [n for n in files_below(output) if n != TRAINER_LOCK])
    return {**report, "curves": training_curves(output / "metrics.jsonl")}


def trainer_config(settings: Settings) -> Path | None:
    """Return the trainer's own file, if the settings name one.

    Raises:
        ConfigError: the file doesn't exist.
    """
    config = settings.train.config
    if config is not None and not config.is_file():
        raise ConfigError(f"{config}: no such trainer config")
    return config


def _decisive(settings: Settings) -> Mapping[str, Any]:
    config = trainer_config(settings)
    told = hash_texts([config.read_text("utf-8")])[:8] if config else "tiny"
    return {"train.config": told, "train.model": settings.train.model}


def _inputs(project: "Project", _: str) -> Mapping[str, str]:
    return {"dataset": digest_of_shards(project)}


def _tokens(project: "Project", batch: str, state: TraceState) -> Mapping[str, Any]:
    """Ask the trainer for the tokens of a state's rows, and which of them are scored."""
    settings = project.settings
    if not (settings.dataset_dir() / "README.md").exists() or find_spec("trl") is None:
        return {}
    splits = {name.rpartition("/")[2] for name in published_rows(project, batch, state)}
    if splits and "train" not in splits:
        return {"tokens": f"none: the state is held out (split {', '.join(sorted(splits))})"}
    command = [*python(TRAINER, "inspect"), "--json", "--state", state["state_id"]]
    command += _told(project)
    done = subprocess.run(
        command, env=start_environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        return {"tokens": done.stderr.strip()}
    return {"tokens": json.loads(done.stdout)}


def _told(project: "Project") -> list[str]:
    """Return the arguments that say what to train, from which dataset, and where to."""
    from replay_pipeline.publish import local_copy

    settings = project.settings
    config, model = trainer_config(settings), settings.train.model
    dataset = local_copy(settings.dataset_dir(), dataset_copy(project))
    words = ["--config", str(config)] if config else []
    words += ["--set", f"dataset={dataset}", "--set", f"output={settings.training_dir()}"]
    return words + (["--set", f"model={model}"] if model else [])


def _figures(receipts: Sequence[Receipt]) -> Mapping[str, Any]:
    report = dict(receipts[-1].report) if receipts else {}
    curves = report.pop("curves", {})
    return {"train": report, "curves": curves}


def _facts(project: Overview, receipt: Receipt) -> Mapping[str, Any]:
    report = receipt.report
    folder = project.settings.model_dir().absolute()
    measured = ("prompt_gain_", "preference_", "blank_", "consensus_")
    evaluation = {key: report[key] for key in sorted(report) if key.startswith(measured)}
    return {
        "dagster/uri": str(folder),
        "loss_first": report["loss_first"],
        "loss_last": report["loss_last"],
        "steps": report["steps"],
        "channels": ", ".join(report["channels_live"]),
        **{
            f"{name} by step": f"{line[0]:.3g} {sparkline(line)} {line[-1]:.3g}"
            for name, line in report.get("curves", {}).items()
        },
        "card": Location(f"{folder}/README.md"),
        "log": Location(f"{folder}/trainer.log"),
        **evaluation,
    }


def acts_as_well(folder: Place) -> AuditResult:
    """Does the model take the consensus action, and write well-formed calls, as often as before?

    Both times greedy, at the same held-out states, before and after training. See docs/train.md.
    """
    report = _report(folder)
    if "acts_worse" not in report:
        return AuditResult(judged=0)
    worse = [one for one in report["findings"] if "acts worse" in one or "general text" in one]
    return AuditResult(
        problems=worse if report["acts_worse"] else [],
        what_to_do="It ranks pairs and has lost how to act: do not publish it. Raise "
        "`trl.drift_weight` or `trl.rpo_alpha`, or lower `trl.learning_rate`, and train again.",
        facts=_both(report, "consensus_rate", "valid_calls", "general_loss"),
        judged=report.get("held_out_states", 0),
    )


def learned_something(folder: Place) -> AuditResult:
    """Did training move held-out pairs towards their chosen sides, more than chance does?"""
    report = _report(folder)
    if "learned" not in report:
        return AuditResult(judged=0)
    nothing = [one for one in report["findings"] if one.startswith("nothing was learned")]
    return AuditResult(
        problems=nothing if report["learned"] is False else [],
        what_to_do="Look at the pairs (`replay-pipeline pairs show`) before you train longer: labels that "
        "are no better than a coin, or a learning rate of nothing, end like this.",
        facts=_both(report, "preference_accuracy", "prompt_gain"),
        judged=0 if report["learned"] is None else report.get("held_out_pairs", 0),
    )


MODEL_CHECKS: Mapping[str, Callable[[Place], AuditResult]] = {
    "acts_as_well_as_before": acts_as_well,
    "something_was_learned": learned_something,
}
"""The checks of a trained model, by name."""


def _report(folder: Place) -> dict[str, Any]:
    [text] = read_files(folder, ["report.json"])
    return json.loads(text) if text else {}


def _both(report: Mapping[str, Any], *names: str) -> dict[str, float]:
    places = (f"{name}_{when}" for name in names for when in ("before", "after"))
    return {place: report[place] for place in places if report.get(place) is not None}


TRAIN = Stage(
    name="train",
    about="A model trained on the dataset with three channels: policy + α·SDPO + β·replay.\n\nIts "
    "metrics are drawn while it runs. Terminate asks it to save a checkpoint, from which the next "
    "run goes on bit for bit.",
    version=1,
    work=train_model,
    settings=_decisive,
    inputs=_inputs,
    is_done=lambda project, _: (project.settings.model_dir() / "report.json").exists(),
    figures=_figures,
    facts=_facts,
    trace=_tokens,
    asset="trained_model",
)
