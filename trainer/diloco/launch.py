"""`python -m trainer launch`: start the replicas of one run and keep them alive."""

import argparse
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainer.diloco.executors.base import ReplicaResult, ServerlessExecutor, supervise
from trainer.diloco.executors.hf_jobs import HFJobsExecutor
from trainer.diloco.executors.local import LocalProcessExecutor
from trainer.diloco.executors.modal import ModalExecutor
from trainer.errors import TrainerConfigError, TrainerError
from trainer.folders import sole_writer

logger = logging.getLogger(__name__)

EXECUTORS: dict[str, Callable[[Path, str, str | None], ServerlessExecutor]] = {
    "local": lambda work_dir, _image, _hardware: LocalProcessExecutor(work_dir),
    "hf_jobs": lambda _, image, flavor: HFJobsExecutor(flavor or "cpu-basic", image=image),
    "modal": lambda _, image, gpu: ModalExecutor(image, gpu),
}


def make_executor(
    name: str, *, work_dir: Path, image: str = "python:3.12", hardware: str | None = None
) -> ServerlessExecutor:
    """Return an executor by its name: `local`, `hf_jobs` or `modal`.

    Args:
        name: Which platform.
        work_dir: Logs of local replicas.
        image: Container image of cloud replicas; it must hold this package.
        hardware: Flavor of a Hugging Face Job, or GPU of a Modal sandbox.

    Raises:
        TrainerConfigError: There is no such executor, or its package is missing.
    """
    if name not in EXECUTORS:
        raise TrainerConfigError(f"executor {name!r}: choose one of {', '.join(EXECUTORS)}")
    return EXECUTORS[name](work_dir, image, hardware)


def launch(
    arguments: Sequence[str],
    *,
    replicas: int,
    uri: str,
    executor: ServerlessExecutor,
    entrypoint: str = "python:trainer",
    max_restarts: int = 10,
    timeout_s: float = 24 * 3600.0,
    poll_s: float = 1.0,
    secrets: Mapping[str, str] | None = None,
    handles_file: Path | None = None,
) -> list[ReplicaResult]:
    """Train with N replicas joined by a store, start dead ones anew, return their logs.

    Args:
        arguments: Of `python -m trainer`; `{rank}` and `{world_size}` are filled in.
        replicas: How many.
        uri: The store that joins them.
        executor: Where they run.
        entrypoint: The program each replica runs.
        max_restarts: Restarts of all replicas together.
        timeout_s: Life of one replica's process, in seconds.
        poll_s: Seconds between looks.
        secrets: Variables such as cloud keys, through the platform's secret store.
        handles_file: Where the replicas' names are kept, for another process to watch them.

    Raises:
        ReplicaFailedError: One died and no restart was left; the others are stopped.
    """
    settings = ["--set", "outer=object_store", "--set", f"outer_options.uri={uri}"]
    if uri.startswith("file://"):
        # On a disk the optimizers' state costs little; on a network it is the user's choice.
        settings += ["--set", f"outer_options.state_uri={uri}"]
    handles = executor.launch_replicas(
        replicas,
        entrypoint,
        [*arguments, *settings],
        secrets=secrets,
        timeout_s=timeout_s,
    )
    if handles_file is not None:
        handles_file.parent.mkdir(parents=True, exist_ok=True)
        handles_file.write_text("".join(f"{handle.to_json()}\n" for handle in handles), "utf-8")
    finished = supervise(
        executor, handles, max_restarts=max_restarts, poll_s=poll_s, secrets=secrets
    )
    return executor.collect(finished, timeout_s=0)


def launch_command(arguments: Sequence[str]) -> int:
    """Run `launch` from the command line; what it does not know goes to every replica.

    Returns:
        The exit code: 0 if all replicas came to the end, 2 for a user's mistake or a failure.
    """
    parser = argparse.ArgumentParser(
        prog="python -m trainer launch",
        description="Train with replicas that share nothing but an object store. Other options "
        "are those of `python -m trainer`; {rank} in them is filled in.",
    )
    parser.add_argument("--replicas", type=int, default=2, help="how many (default: 2)")
    parser.add_argument("--executor", choices=EXECUTORS, default="local", help="where they run")
    parser.add_argument("--uri", help="store that joins them (default: a folder, local only)")
    parser.add_argument("--work-dir", type=Path, default=Path("outer"), help="logs and handles")
    parser.add_argument("--image", default="python:3.12", help="container image (cloud)")
    parser.add_argument("--hardware", help="flavor (hf_jobs) or GPU (modal)")
    parser.add_argument("--max-restarts", type=int, default=10, help="of all replicas together")
    options, rest = parser.parse_known_args(arguments)
    try:
        if options.uri is None and options.executor != "local":
            raise TrainerConfigError("--uri is needed: cloud replicas cannot see a local folder")
        executor = make_executor(
            options.executor,
            work_dir=options.work_dir / "replicas",
            image=options.image,
            hardware=options.hardware,
        )
        with sole_writer(options.work_dir):
            results = launch(
                rest,
                replicas=options.replicas,
                uri=options.uri or f"file://{(options.work_dir / 'store').resolve()}",
                executor=executor,
                max_restarts=options.max_restarts,
                handles_file=options.work_dir / "handles.jsonl",
            )
    except TrainerError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    for result in results:
        last = (result.log.strip().splitlines() or [""])[-1]
        sys.stdout.write(f"replica {result.rank} (attempt {result.attempt}): {last}\n")
    return 0
