"""`python -m trainer launch`: start the replicas of one run and keep them alive."""

import argparse
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trainer.errors import TrainerConfigError, TrainerError
from trainer.folders import sole_writer
from trainer.outer.environment import variables_named
from trainer.outer.executors.base import (
    ReplicaHandle,
    ReplicaResult,
    ServerlessExecutor,
    supervise,
)
from trainer.outer.executors.hf_jobs import HFJobsExecutor
from trainer.outer.executors.local import LocalProcessExecutor
from trainer.outer.executors.modal import ModalExecutor

logger = logging.getLogger(__name__)

EXECUTORS = ("local", "hf_jobs", "modal")
HANDLES, WATCH = "handles.jsonl", "watch.json"
INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What another process needs to go on watching replicas; names of secrets, no values."""

    executor: str = "local"
    image: str = "python:3.12"
    hardware: str | None = None
    cpu: float | None = None
    memory_mib: int | None = None
    namespace: str | None = None
    secrets: tuple[str, ...] = ()
    max_restarts: int = 10


def make_executor(
    name: str,
    *,
    work_dir: Path,
    image: str = "python:3.12",
    hardware: str | None = None,
    cpu: float | None = None,
    memory_mib: int | None = None,
    namespace: str | None = None,
) -> ServerlessExecutor:
    """Return an executor by its name: `local`, `hf_jobs` or `modal`.

    Args:
        name: Which platform.
        work_dir: Logs of local replicas.
        image: Container image of cloud replicas; it must hold this package.
        hardware: Flavor of a Hugging Face Job, or GPU of a Modal sandbox.
        cpu: Cores of a Modal sandbox.
        memory_mib: Memory of a Modal sandbox.
        namespace: Who pays for Hugging Face Jobs; None takes the token's owner.

    Raises:
        TrainerConfigError: There is no such executor, or its package is missing.
    """
    match name:
        case "local":
            return LocalProcessExecutor(work_dir)
        case "hf_jobs":
            return HFJobsExecutor(hardware or "cpu-basic", image=image, namespace=namespace)
        case "modal":
            return ModalExecutor(image, hardware, cpu=cpu, memory_mib=memory_mib)
    raise TrainerConfigError(f"executor {name!r}: choose one of {', '.join(EXECUTORS)}")


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
    env: Mapping[str, str] | None = None,
    secrets: Mapping[str, str] | None = None,
    handles_file: Path | None = None,
    is_detached: bool = False,
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
        env: Further variables.
        secrets: Variables such as cloud keys, through the platform's secret store.
        handles_file: Where the replicas' names are kept, for another process to watch them. If
            it names replicas of the same command, those are watched, and none is launched.
        is_detached: Return as soon as all are started, with no result.

    Raises:
        ReplicaFailedError: One died and no restart was left; the others are stopped.
        TrainerConfigError: `handles_file` names replicas of another command.
    """
    settings = ["--set", "outer=object_store", "--set", f"outer_options.uri={uri}"]
    if uri.startswith("file://"):
        # On a disk the optimizers' state costs little; on a network it is the user's choice.
        settings += ["--set", f"outer_options.state_uri={uri}"]
    command = [*arguments, *settings]
    handles = read_handles(handles_file) if handles_file is not None else []
    if handles:
        _check_same(handles, executor, entrypoint, command, replicas)
        logger.warning("%s: replicas are there already, going on with them", handles_file)
    else:
        handles = executor.launch_replicas(
            replicas, entrypoint, command, env=env, secrets=secrets, timeout_s=timeout_s
        )
        keep_handles(handles_file, handles)
    if is_detached:
        return []
    return watch(
        executor,
        handles,
        max_restarts=max_restarts,
        poll_s=poll_s,
        secrets=secrets,
        handles_file=handles_file,
    )


def watch(
    executor: ServerlessExecutor,
    handles: Sequence[ReplicaHandle],
    *,
    max_restarts: int = 10,
    poll_s: float = 1.0,
    secrets: Mapping[str, str] | None = None,
    handles_file: Path | None = None,
) -> list[ReplicaResult]:
    """Start dead replicas anew until all have succeeded; return their logs.

    Raises:
        ReplicaFailedError: One died and no restart was left; the others are stopped.
    """
    finished = supervise(
        executor,
        handles,
        max_restarts=max_restarts,
        poll_s=poll_s,
        secrets=secrets,
        on_change=lambda changed: keep_handles(handles_file, changed),
    )
    return executor.collect(finished, timeout_s=0)


def keep_handles(path: Path | None, handles: Sequence[ReplicaHandle]) -> None:
    """Write handles for another process; a reader sees the old or the new ones."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".part")
        aside.write_text("".join(f"{handle.to_json()}\n" for handle in handles), "utf-8")
        aside.replace(path)


def read_handles(path: Path) -> list[ReplicaHandle]:
    """Return the handles that `keep_handles` wrote; none if there is no file.

    Raises:
        TrainerConfigError: A line is no handle.
    """
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return [ReplicaHandle.from_json(line) for line in lines]


def _check_same(
    handles: Sequence[ReplicaHandle],
    executor: ServerlessExecutor,
    entrypoint: str,
    command: Sequence[str],
    replicas: int,
) -> None:
    wanted = [executor.command_of(entrypoint, command, rank, replicas) for rank in range(replicas)]
    if [handle.command for handle in handles] != wanted:
        raise TrainerConfigError(
            "the work dir is that of a launch with other arguments: give another --work-dir"
        )


def launch_command(arguments: Sequence[str]) -> int:
    """Run `launch` from the command line; what it does not know goes to every replica.

    Returns:
        The exit code: 0 if all replicas came to the end, 2 for a user's mistake or a failure, 130
        if the watch was interrupted.
    """
    parser = argparse.ArgumentParser(
        prog="python -m trainer launch",
        description="Train with replicas that share nothing but an object store. Other options "
        "are those of `python -m trainer`; {rank} in them is filled in. The same command again "
        "goes on with the replicas that are there.",
    )
    parser.add_argument("--replicas", type=int, default=2, help="how many (default: 2)")
    parser.add_argument(
        "--processes", type=int, default=1, help="of each replica, by torchrun (default: 1)"
    )
    parser.add_argument("--executor", choices=EXECUTORS, default="local", help="where they run")
    parser.add_argument("--uri", help="store that joins them (default: a folder, local only)")
    _add_work_dir(parser)
    parser.add_argument("--image", default="python:3.12", help="container image (cloud)")
    parser.add_argument("--hardware", help="flavor (hf_jobs) or GPU (modal)")
    parser.add_argument("--cpu", type=float, help="cores of each replica (modal)")
    parser.add_argument("--memory", type=int, metavar="MIB", help="of each replica (modal)")
    parser.add_argument("--namespace", help="who pays (hf_jobs; default: the token's owner)")
    parser.add_argument(
        "--secret", action="append", default=[], metavar="NAME",
        help="hand this variable on through the platform's secrets",
    )  # fmt: skip
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="set this variable"
    )
    parser.add_argument("--detach", action="store_true", help="start, and do not watch")
    parser.add_argument("--max-restarts", type=int, default=10, help="of all replicas together")
    options, rest = parser.parse_known_args(arguments)
    entrypoint = "python:trainer"
    if options.processes > 1:
        entrypoint = "python:torch.distributed.run"
        n = str(options.processes)
        rest = ["--standalone", "--nproc-per-node", n, "-m", "trainer", *rest]
    how = Watch(
        executor=options.executor,
        image=options.image,
        hardware=options.hardware,
        cpu=options.cpu,
        memory_mib=options.memory,
        namespace=options.namespace,
        secrets=tuple(options.secret),
        max_restarts=options.max_restarts,
    )

    def run() -> list[ReplicaResult]:
        if options.uri is None and how.executor != "local":
            raise TrainerConfigError("--uri is needed: cloud replicas cannot see a local folder")
        executor, secrets = _executor_of(how, options.work_dir), variables_named(how.secrets)
        with sole_writer(options.work_dir):
            (options.work_dir / WATCH).write_bytes(msgspec.json.encode(how))
            return launch(
                rest,
                replicas=options.replicas,
                uri=options.uri or f"file://{(options.work_dir / 'store').resolve()}",
                executor=executor,
                entrypoint=entrypoint,
                max_restarts=how.max_restarts,
                env=dict(_pair(text) for text in options.env),
                secrets=secrets,
                handles_file=options.work_dir / HANDLES,
                is_detached=options.detach,
            )

    return _told(run, options.work_dir)


def attach_command(arguments: Sequence[str]) -> int:
    """Run `attach`: watch the replicas that another process has launched."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer attach", description="Watch replicas that were launched before."
    )
    _add_work_dir(parser)
    options = parser.parse_args(arguments)

    def run() -> list[ReplicaResult]:
        how, executor, handles = _launched(options.work_dir)
        secrets = variables_named(how.secrets)
        with sole_writer(options.work_dir):
            return watch(
                executor,
                handles,
                max_restarts=how.max_restarts,
                secrets=secrets,
                handles_file=options.work_dir / HANDLES,
            )

    return _told(run, options.work_dir)


def logs_command(arguments: Sequence[str]) -> int:
    """Run `logs`: print what replicas have written."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer logs", description="Print what replicas have written."
    )
    _add_work_dir(parser)
    parser.add_argument("--rank", type=int, help="only of this one")
    options = parser.parse_args(arguments)

    def run() -> list[ReplicaResult]:
        _, executor, handles = _launched(options.work_dir)
        for handle in handles:
            if options.rank in (None, handle.rank):
                status = executor.poll([handle])[0]
                sys.stdout.write(f"replica {handle.rank}: {status.state.value}\n")
                sys.stdout.write(executor.logs(handle))
        return []

    return _told(run, options.work_dir)


def stop_command(arguments: Sequence[str]) -> int:
    """Run `stop`: end the replicas of a launch."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer stop", description="End replicas that were launched before."
    )
    _add_work_dir(parser)
    options = parser.parse_args(arguments)

    def run() -> list[ReplicaResult]:
        _, executor, handles = _launched(options.work_dir)
        executor.cancel(handles)
        return []

    return _told(run, options.work_dir)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "launch": launch_command,
    "attach": attach_command,
    "logs": logs_command,
    "stop": stop_command,
}


def _add_work_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--work-dir", type=Path, default=Path("outer"), help="logs and handles")


def _executor_of(how: Watch, work_dir: Path) -> ServerlessExecutor:
    return make_executor(
        how.executor,
        work_dir=work_dir / "replicas",
        image=how.image,
        hardware=how.hardware,
        cpu=how.cpu,
        memory_mib=how.memory_mib,
        namespace=how.namespace,
    )


def _launched(work_dir: Path) -> tuple[Watch, ServerlessExecutor, list[ReplicaHandle]]:
    handles = read_handles(work_dir / HANDLES)
    if not handles:
        raise TrainerConfigError(f"{work_dir}: nothing was launched from here")
    how = msgspec.json.decode((work_dir / WATCH).read_bytes(), type=Watch)
    return how, _executor_of(how, work_dir), handles


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise TrainerConfigError(f"--env {text}: expected NAME=VALUE")
    return name, value


def _told(run: Callable[[], list[ReplicaResult]], work_dir: Path) -> int:
    """Run a command, print what came of it, and return the exit code."""
    try:
        results = run()
    except TrainerError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(
            f"not watched any more; python -m trainer attach --work-dir {work_dir} goes on, stop "
            "ends what still runs\n"
        )
        return INTERRUPTED
    for result in results:
        last = (result.log.strip().splitlines() or [""])[-1]
        sys.stdout.write(f"replica {result.rank} (attempt {result.attempt}): {last}\n")
    return 0
