"""`replay-train [ENGINE] --config FILE.yaml [--set key=value ...]`: one training run."""

import argparse
import atexit
import gc
import importlib
import json
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from trainer.data.types import StopRequest
from trainer.errors import (
    OuterLoopError,
    TrainerConfigError,
    TrainerError,
    TrainingStoppedError,
)

DEFAULT_CONFIG = Path(__file__).parent / "tiny.yaml"
PRETRAINED_CONFIG = Path(__file__).parent / "pretrained.yaml"
"""The settings if you name a model by `--set model=` but no file. The tiny model's learning rate
would ruin a real model."""
logger = logging.getLogger(__name__)


def read_config(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a YAML file and apply `key=value`. Dots reach into sections (`trl.max_steps=5`).

    Raises:
        TrainerConfigError: the file isn't readable or isn't a mapping, or an override lacks `=`.
    """
    try:
        values = yaml.safe_load(path.read_text("utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise TrainerConfigError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise TrainerConfigError(f"{path}: expected a mapping of settings")
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator:
            raise TrainerConfigError(f"--set {override}: expected key=value")
        section: Any = values
        *outer, last = key.split(".")
        for name in outer:
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                raise TrainerConfigError(f"--set {override}: {name} is not a section")
        section[last] = yaml.safe_load(text)
    return values


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return 0 on success, or 2 if a setting or the dataset is wrong.

    A run that Ctrl-C stopped returns 130, and one that SIGTERM stopped 143.

    If the first word is `launch` or a related command, the rest describes replicas: see
    `trainer.diloco.launch`.

    Raises:
        ModuleNotFoundError: a package is missing, and no extra contains it.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] == "inspect":
        return _inspect(given[1:])
    if given and given[0] in COMMANDS:
        module, _, name = COMMANDS[given[0]].partition(":")
        with uncollected():
            command = getattr(importlib.import_module(module), name)
        return command(given[1:])
    parser = argparse.ArgumentParser(
        prog="replay-train", description="Train on a published preference dataset."
    )
    parser.add_argument(
        "engine",
        nargs="?",
        choices=ENGINES,
        default="trl",
        help="who trains: trl in this process (default), or an engine of docs/frameworks.md",
    )
    parser.add_argument(
        "--config",
        type=Path,
        help="YAML file; by default the bundled tiny.yaml, or pretrained.yaml with --set model=…",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="put over the file, e.g. --set dataset=demo/dataset --set trl.max_steps=5",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest complete checkpoint of the same run, if there is one "
        "(resume_from=last, unless the file names a checkpoint)",
    )
    parser.add_argument(
        "--again", action="store_true", help="with --resume: start anew what is finished"
    )
    parser.add_argument(
        "--check", action="store_true", help="read settings, dataset, and store, and train nothing"
    )
    options = parser.parse_args(given)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        values = read_config(options.config or _default(options.overrides), options.overrides)
        if options.resume and not values.get("resume_from"):
            values["resume_from"] = "last"
        if options.again:
            values["again"] = True
        report = (_checked if options.check else ENGINES[options.engine])(values)
    except TrainingStoppedError as stopped:
        sys.stderr.write(f"{stopped}\n")
        return stopped.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        return 128 + signal.SIGINT
    except TrainerError as error:
        sys.stderr.write(f"error: {error}\n")
        # A launcher starts a replica again that ended with 1, and none with a user's error.
        return 1 if isinstance(error, OuterLoopError) else 2
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _PACKAGES:
            raise
        sys.stderr.write(
            f"error: {error.name} is not installed: pip install 'replay-pipeline[train]'\n"
        )
        return 2
    told = report_words(report, values) if sys.stdout.isatty() else json.dumps(report)
    sys.stdout.write(told + "\n")
    return 0


def report_words(report: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """Return a report in sentences for a terminal. Programs that read the output get JSON."""
    lines = []
    if {"steps", "loss_first", "loss_last"} <= report.keys():
        lines.append(
            f"{report['steps']:,} steps: the loss went from {report['loss_first']:.3f} to "
            f"{report['loss_last']:.3f}."
        )
    for name, words in (
        ("preference_accuracy", "Right on held-out pairs"),
        ("blank_prompt_accuracy", "The same with a blank prompt"),
        ("consensus_rate", "Takes the consensus action"),
        ("valid_calls", "Writes well-formed calls"),
    ):
        before, after = (report.get(f"{name}_{when}") for when in ("before", "after"))
        if before is not None and after is not None:
            lines.append(f"{words}: {100 * before:.1f} % before, {100 * after:.1f} % after.")
    lines += [
        f"Channel {name} taught nothing: {reason}."
        for name, reason in (report.get("channels_off") or {}).items()
        if not reason.endswith("is 0")
    ]
    lines += [f"{each[:1].upper()}{each[1:].rstrip('.')}." for each in report.get("findings") or ()]
    if output := values.get("output"):
        lines.append(
            f"Next: look into {output}: report.json has every figure, loss.png the curves."
        )
    return "\n".join(lines) if lines else json.dumps(report)


_PACKAGES = {"accelerate", "datasets", "peft", "safetensors", "torch", "transformers", "trl"}
"""What the extra `train` brings, by the names of their modules."""

COMMANDS = {
    "launch": "trainer.diloco.launch:launch_command",
    "export": "trainer.diloco.export:export_command",
}
"""Commands about replicas or a finished model, instead of a run in this process."""


def _default(overrides: Sequence[str]) -> Path:
    names_model = any(text.startswith("model=") for text in overrides)
    return PRETRAINED_CONFIG if names_model else DEFAULT_CONFIG


def _inspect(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="replay-train inspect",
        description="Print pairs as the model sees them: what is read, what is scored, what was cut.",
    )
    parser.add_argument("--rows", type=int, default=3, metavar="N", help="how many (default: 3)")
    parser.add_argument("--state", metavar="ID", help="the pairs of this state instead")
    parser.add_argument("--json", action="store_true", help="with token ids, for programs")
    parser.add_argument("--config", type=Path, help="YAML file, as for a run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    options = parser.parse_args(arguments)
    with uncollected():
        from transformers import AutoTokenizer  # noqa: PLC0415 - loads torch

        from trainer.data.as_seen import as_seen, parts_of  # noqa: PLC0415
        from trainer.data.dataset import load_preference_data  # noqa: PLC0415
        from trainer.data.rendering import Renderer  # noqa: PLC0415
        from trainer.engines.settings_file import read_settings  # noqa: PLC0415
        from trainer.model.loading import load_tokenizer  # noqa: PLC0415

    try:
        values = read_config(options.config or _default(options.overrides), options.overrides)
        config = read_settings(values)
        data = load_preference_data(config.dataset, revision=config.revision)
        trained = Path(config.output) / "checkpoint"
        tokenizer: Any = (
            AutoTokenizer.from_pretrained(str(trained), padding_side="left")
            if trained.is_dir()
            else load_tokenizer(config, data)
        )
        renderer = Renderer(tokenizer=tokenizer, **config.shared.rendering)
        rows = data.sft_pairs(config.shared.drawn)
        if options.state is not None:
            rows = [row for row in rows if row.get("state_id") == options.state]
        else:
            rows = rows[: options.rows]
        found = [as_seen(row, renderer) for row in rows]
    except TrainerError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if not found and not options.json:
        wanted = f"state {options.state}" if options.state else "pairs"
        sys.stderr.write(f"error: {values['dataset']} has no {wanted} among its training rows\n")
        return 2
    lines = [json.dumps(found)] if options.json else []
    for number, row in enumerate(() if options.json else found, 1):
        lines.append(f"══ row {number}, state {row['state_id']}, weight {row['weight']}")
        lines += [line for heading, text in parts_of(row) for line in (f"── {heading}", text)]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _run_on_mesh(values: dict[str, Any]) -> dict[str, Any]:
    try:
        from trainer.engines.monarch.controller import train_on_mesh  # noqa: PLC0415
    except ImportError as error:
        raise TrainerConfigError(
            f"the engine monarch needs the package torchmonarch ({error}): pip install "
            "'torchmonarch>=0.7,<0.8'"
        ) from error
    return train_on_mesh(values)


def _run(values: dict[str, Any]) -> dict[str, Any]:
    # Loading TRL takes seconds: a wrong flag should not have to wait for it.
    with uncollected():
        import torch  # noqa: PLC0415

        from trainer.engines.settings_file import read_settings  # noqa: PLC0415
        from trainer.engines.trl.run import run  # noqa: PLC0415

    if values.get("model") is None:
        torch.set_num_threads(1)  # the products of a tiny model only lose by sharing
    with stop_signals() as stop:
        return run(read_settings(values), stop=stop)


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    with uncollected():
        from trainer.data.collator import ComposerDataCollator  # noqa: PLC0415 - loads torch
        from trainer.data.dataset import load_preference_data  # noqa: PLC0415
        from trainer.diloco.callback import OuterOptions, outer_callbacks  # noqa: PLC0415
        from trainer.diloco.environment import ReplicaPlace  # noqa: PLC0415
        from trainer.diloco.object_store import check_store  # noqa: PLC0415
        from trainer.engines.settings_file import read_settings  # noqa: PLC0415
        from trainer.model.loading import load_tokenizer, usable_data  # noqa: PLC0415
        from trainer.settings import section_of  # noqa: PLC0415

        config = read_settings(values)
    data = load_preference_data(config.dataset, revision=config.revision)
    collator = ComposerDataCollator(load_tokenizer(config, data), **config.shared.rendering)
    usable_data(config, collator.renderer, data)
    outer = section_of(OuterOptions, config.outer_options, "outer_options.")
    if outer_callbacks(config.outer, outer, place=ReplicaPlace()):
        check_store(outer.uri)
    return {"checked": config.dataset}


@contextmanager
def uncollected() -> Iterator[None]:
    """Load modules without garbage collection, which would otherwise run many times.

    This saves a quarter of the time to load torch and TRL.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Yield the wish of SIGTERM or Ctrl-C that this process stops.

    A second signal ends the process at once. Outside the main thread, no handler can be set, so
    signals have no effect.

    Raises:
        TrainingStoppedError: a signal came where nothing is to be saved, or what it says was saved.
    """
    stop, seen = StopRequest(), set[int]()

    def note(number: int, frame: object) -> None:
        del frame
        if number in seen:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        seen.add(number)
        stop.ask()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    except (KeyboardInterrupt, TrainingStoppedError) as error:
        stopped = error
        if not isinstance(stopped, TrainingStoppedError):
            stopped = TrainingStoppedError(
                "stopped before a step was made: there is nothing to save but the texts that are "
                "tokenized. To go on, run the same command again"
            )
        stopped.exit_code = 128 + next(iter(seen), signal.SIGINT)
        raise stopped from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_with_verl(values: dict[str, Any]) -> dict[str, Any]:
    from trainer.engines.verl.launch import train_with_verl  # noqa: PLC0415 - loads torch

    with stop_signals() as stop:
        stop.is_held = True
        return train_with_verl(values, should_stop=stop)


def _prepare_prime_rl(values: dict[str, Any]) -> dict[str, Any]:
    from trainer.engines.prime_rl.prepare import prepare_prime_rl  # noqa: PLC0415 - loads torch

    return prepare_prime_rl(values)


ENGINES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "trl": _run,
    "monarch": _run_on_mesh,
    "verl": _run_with_verl,
    "prime_rl": _prepare_prime_rl,
}
"""The engines by their name on the command line."""


if __name__ == "__main__":
    atexit.register(gc.freeze)  # nor is there anything to look for at the end
    sys.exit(main())
