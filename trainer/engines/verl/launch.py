"""`replay-train verl`: run VeRL's unmodified `main_ppo` with the plug-in, and watch it from outside."""

import contextlib
import importlib.metadata
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.data.folders import sole_writer
from trainer.engines.settings_file import read_settings
from trainer.engines.verl.options import PluginOptions, verl_environment
from trainer.engines.verl.prepare import PreparedRun, prepare
from trainer.errors import TrainerConfigError, TrainerError, TrainingStoppedError

logger = logging.getLogger(__name__)

POLL_S = 0.5
STOP_S = 20.0
SUPPORTED = ("0.9",)


def train_with_verl(
    values: Mapping[str, Any], *, should_stop: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    """Prepare the run of a settings file and train it. Metrics and log go to its output folder."""
    settings = read_settings(values, "verl")
    require_version()
    with sole_writer(Path(settings.output)):
        run = prepare(settings)
        told = run.n_prompts, run.n_hints, run.n_pairs
        logger.info("verl: %d states (%d with hint), %d pairs", *told)
        folder = run.config.parent
        metrics = folder / "verl_metrics.jsonl"
        metrics.unlink(missing_ok=True)
        rows = watched(run, metrics, folder / "verl.log", should_stop)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "metrics.jsonl").write_text(lines, "utf-8")
    return {
        "steps": rows[-1]["step"] if rows else 0,
        "channels_live": live_channels(rows, run.options),
        "states": run.n_prompts,
        "pairs": run.n_pairs,
    }


def require_version() -> None:
    """Check that VeRL is installed, in a version that the plug-in was tested with.

    Raises:
        TrainerConfigError: VeRL is missing, or has an untested version.
    """
    try:
        version = importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError as error:
        raise TrainerConfigError(
            "the engine verl needs the package verl: make an environment of its own with "
            "pip install -r recipes/verl/requirements.txt"
        ) from error
    if not version.startswith(SUPPORTED):
        raise TrainerConfigError(
            f"verl {version} is installed and the plug-in was tested with {SUPPORTED[0]}.x: "
            f"pip install 'verl>={SUPPORTED[0]},<0.10'"
        )


def watched(
    run: PreparedRun, metrics: Path, log: Path, should_stop: Callable[[], bool]
) -> list[dict[str, Any]]:
    """Run `main_ppo` to its end, or stop it after the first step if a channel has no effect.

    Raises:
        TrainerConfigError: a channel with a weight has no metrics in the first step.
        TrainingStoppedError: `should_stop` returned true.
        TrainerError: VeRL ended with an error.
    """
    command = [sys.executable, "-m", "verl.trainer.main_ppo"]
    command += ["--config-dir", str(run.config.parent), "--config-name", run.config.stem]
    environment = verl_environment(run.options, VERL_FILE_LOGGER_PATH=str(metrics))
    is_checked = False
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=run.config.parent,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                _wait(process, POLL_S)
                if should_stop():
                    raise TrainingStoppedError("stopped; VeRL goes on from its last checkpoint")
                if not is_checked:
                    is_checked = check_first_step(metrics, run.options)
        finally:
            _stop(process)
    if process.returncode != 0:
        raise TrainerError(f"VeRL ended with {process.returncode}: {_last_error(log)}; see {log}")
    if not is_checked and not check_first_step(metrics, run.options):
        raise TrainerError(f"VeRL ended before its first training step; see {log}")
    return list(_rows(metrics))


def check_first_step(metrics: Path, options: PluginOptions) -> bool:
    """Check the first step's metrics. Return False while there are none.

    Raises:
        TrainerConfigError: a channel with a weight has no metrics.
    """
    first = next(_rows(metrics), None)
    if first is None:
        return False
    channels = (
        (2, options.alpha_sdpo, "sdpo/n_tokens"),
        (3, options.beta_replay, "replay/n_pairs"),
    )
    silent = [
        f"channel {n} has weight {weight} and reported nothing: the plug-in is not live in the workers"
        for n, weight, name in channels
        if weight > 0 and value_of(first, name) is None
    ]
    if silent:
        raise TrainerConfigError("stopped after the first step: " + "; ".join(silent))
    if options.alpha_sdpo > 0 and value_of(first, "sdpo/n_tokens") == 0:
        logger.warning("channel sdpo did nothing in the first step: none of its rows has a hint")
    return True


def value_of(row: Mapping[str, Any], name: str) -> float | None:
    """Return a metric by our name, if it is there. VeRL's name has the prefix `actor/`."""
    return row.get(f"actor/{name}", row.get(name))


def live_channels(rows: list[dict[str, Any]], options: PluginOptions) -> list[str]:
    """Return the channels that contributed to some step."""
    live = []
    spread = ("critic/advantages/max", "critic/advantages/min")
    if options.policy_weight > 0 and any(row.get(name, 0.0) for row in rows for name in spread):
        live.append("policy")
    for name, key in (("sdpo", "sdpo/n_tokens"), ("replay", "replay/n_pairs")):
        if any((value_of(row, key) or 0) > 0 for row in rows):
            live.append(name)
    return live


def _rows(metrics: Path) -> Iterator[dict[str, Any]]:
    """Yield whole lines of VeRL's file logger, flat."""
    if not metrics.exists():
        return
    for line in metrics.read_text("utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            row = json.loads(line)
            yield {"step": row["step"], **row["data"]}


def _wait(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End the process and what it started; Ray's own processes follow their driver."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, kind)
        _wait(process, STOP_S)


def _last_error(log: Path) -> str:
    lines = log.read_text("utf-8", "replace").splitlines()
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["no output"])[-1].strip()[-500:]
