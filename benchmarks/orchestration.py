"""What Dagster costs on top of the work: per batch and asset, at a thousand partitions.

    python benchmarks/orchestration.py [--small] [--json FILE]

Every figure is taken on the real pipeline over generated sessions, one batch each, with a real
teacher server on loopback: a range run of all batches (which is also what a backfill is), the same
run again with nothing changed, a tick of the sensor, `status`, a backfill from the web server with
the pages that are looked at meanwhile, and a click in the web server to the end of its run, with the
daemon between them. CPU seconds are of this machine's core; wall clocks count everything else that
the machine does as well.
"""

import argparse
import functools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["DAGSTER_EVENT_BATCH_SIZE"] = "500"  # as `replay-pipeline ui` sets it

import dagster as dg

from benchmarks.shared_log import shared_log, wait_for_writers
from replay_pipeline.assets.automation import new_sessions
from replay_pipeline.assets.code_location import define
from replay_pipeline.assets.instance import prepare_home, ui_command
from replay_pipeline.assets.reporting import RANGE_END, RANGE_START
from replay_pipeline.assets.resources import PipelineResource
from replay_pipeline.settings import Settings
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.stages.views.status import status_of
from replay_pipeline.testing import TeacherServer
from tests.support.dagster_web import graphql, launch_batch, process_tree, sign_in, wait_for_run
from tests.support.ports import free_port
from tests.support.sessions import SessionBuilder, ToolCall
from tests.support.settings_files import write_settings

T = TypeVar("T")

ASSETS = ("trace_states", "teacher_actions", "dpo_pairs", "normalized_pairs")
QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
_BACKFILL = """
mutation Backfill($params: LaunchBackfillParams!) {
  launchPartitionBackfill(backfillParams: $params) {
    __typename
    ... on LaunchBackfillSuccess { backfillId }
    ... on PythonError { message }
  }
}
"""
_BACKFILL_STATUS = """
query Backfill($id: String!) {
  partitionBackfillOrError(backfillId: $id) { ... on PartitionBackfill { status } }
}
"""


def launch_backfill(url: str, batches: Sequence[str], assets: Sequence[str]) -> str:
    """Ask for assets of many batches at once, as the UI does; returns the backfill's id.

    Raises:
        OSError: nobody answers, or the backfill is refused, as it is until the server has its code
            location.
    """
    params = {"assetSelection": [{"path": [a]} for a in assets], "partitionNames": [*batches]}
    launched = graphql(url, _BACKFILL, params=params)["launchPartitionBackfill"]
    if launched["__typename"] != "LaunchBackfillSuccess":
        raise OSError(f"{url}: no backfill was started: {launched}")
    return launched["backfillId"]


def backfill_status(url: str, backfill_id: str) -> str:
    """How far a backfill is: `REQUESTED` until its runs have ended, then how they did.

    Raises:
        OSError: nobody answers.
    """
    return graphql(url, _BACKFILL_STATUS, id=backfill_id)["partitionBackfillOrError"]["status"]


def make_root(folder: Path, n: int, server: TeacherServer) -> Pipeline:
    """A data root with `n` batches of one short session each, none of them ingested."""
    for i in range(n):
        builder = SessionBuilder(f"bench-{i}")
        builder.user(f"Module {i} fails, please look.")
        call = ToolCall("Read", {"file_path": f"{builder.cwd}/src/module_{i}.py"})
        message = builder.assistant(f"I read module {i}.", [call])
        builder.result(message.tool_use_ids[0], f"def module_{i}(): ...")
        builder.assistant(f"Module {i} is fine now.")
        builder.write(folder / "projects")
    root = folder / "data"
    write_settings(
        root,
        ingest={"sources": [folder / "projects"], "settle_s": 0, "max_batch_sessions": 1},
        replay={
            "max_total_usd": 1000.0,
            "teachers": server.teachers(["deepseek/deepseek-v4-pro"]),
        },
        pairs={"agreement_threshold": 1},
    )
    work = at(root)
    work.find_batches()
    assert len(work.batches()) == n
    return work


def at(root: Path) -> Pipeline:
    return Pipeline(Settings.load(data_dir=root))


def by_hand(root: Path) -> None:
    """All stages as plain calls, asset by asset as a range run has them."""
    work = at(root)
    for stage in (work.ingest, work.replay_within(), work.pairs, work.normalize):
        for batch in work.batches():
            stage(batch)


def range_run(root: Path, instance: dg.DagsterInstance) -> None:
    """All batches through all four assets in one run."""
    os.environ["REPLAY_DATA"] = str(root)
    batches = at(root).batches()
    instance.add_dynamic_partitions("trace_batch", batches)
    job = define(PipelineResource()).resolve_job_def("replay_batches")
    tags = {RANGE_START: batches[0], RANGE_END: batches[-1]}
    assert job.execute_in_process(instance=instance, tags=tags, run_config=QUIET).success


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """CPU seconds and wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def per_batch(folder: Path, n: int, *, with_backfill: bool) -> dict[str, float]:
    """Range runs with work and without, against plain calls."""
    figures: dict[str, float] = {}
    with TeacherServer(script={"content": "I read the test first."}) as server:
        (folder / "warm").mkdir()
        by_hand(make_root(folder / "warm", 2, server).root.path)  # what is loaded once
        root = make_root(folder, n, server).root.path
        copy = folder / "by-hand"
        shutil.copytree(root, copy)
        plain_cpu, _ = timed(lambda: by_hand(copy))
        home = prepare_home(root)
        with dg.DagsterInstance.from_config(str(home)) as instance:
            first_cpu, _ = timed(lambda: range_run(root, instance))
            again_cpu, again_wall = timed(lambda: range_run(root, instance))
            tick_cpu, tick_wall = timed(lambda: sensor_tick(root, instance))
        units = n * len(ASSETS)
        figures["cpu_ms_per_batch_and_asset"] = (first_cpu - plain_cpu) / units * 1e3
        figures["cpu_ms_of_the_work_itself"] = plain_cpu / units * 1e3
        figures["cpu_ms_per_unchanged_batch_and_asset"] = again_cpu / units * 1e3
        figures["unchanged_rerun_s"] = again_wall
        figures["unchanged_rerun_cpu_s"] = again_cpu
        figures["sensor_tick_s"] = tick_wall
        figures["sensor_tick_cpu_s"] = tick_cpu
        _, figures["status_s"] = timed(lambda: status_of(at(root)))
        figures["peak_memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        if with_backfill:
            figures |= backfill(root)
    return figures


def sensor_tick(root: Path, instance: dg.DagsterInstance) -> None:
    os.environ["REPLAY_DATA"] = str(root)
    context = dg.build_sensor_context(instance=instance)
    new_sessions(context, pipeline=PipelineResource())


# The web server


@contextmanager
def served(work: Pipeline, log: Path) -> Iterator[tuple[str, int]]:
    """The web server and the daemon of `replay-pipeline ui`: address and process."""
    port = free_port()
    command, environment = ui_command(work.settings, port=port)
    with dg.DagsterInstance.from_config(environment["DAGSTER_HOME"]) as instance:
        instance.add_dynamic_partitions("trace_batch", work.batches())
    with shared_log(log) as lines:
        process = subprocess.Popen(command, env=environment, stdout=lines, stderr=lines)
    try:
        yield once_up(lambda: sign_in(log)), process.pid
    finally:
        process.terminate()
        process.wait(60)
        wait_for_writers(log)


def once_up(ask: Callable[[], T]) -> T:
    """What `ask` gives as soon as the server is there and has its code location."""
    end = time.monotonic() + 180
    while True:
        try:
            return ask()
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.5)


def click(url: str, batch: str) -> float:
    """Seconds from the launch of a run in the web server to its success."""
    began = time.perf_counter()
    ended = wait_for_run(url, launch_batch(url, batch))
    assert ended == "SUCCESS", ended
    return time.perf_counter() - began


def clicks(folder: Path, n: int, *, with_backfill: bool) -> dict[str, float]:
    """`n` clicks on a small batch, and then a backfill of these batches if it has had no other."""
    with TeacherServer(script={"content": "I read the test first."}) as server:
        work = make_root(folder, n + 1, server)
        with served(work, folder / "ui.log") as (url, pid):
            first, *rest = work.batches()
            once_up(lambda: click(url, first))
            seconds = sorted(click(url, batch) for batch in rest)
            memory = sum(pss_mib(each) for each in process_tree(pid))
            figures = backfill_at(url, work) if with_backfill else {}
    return figures | {"click_to_success_s": seconds[len(seconds) // 2], "ui_memory_mib": memory}


PAGES = {
    "graph": """{ assetNodes(loadMaterializations: true) {
        assetKey { path } staleStatus partitionStats { numMaterialized numPartitions }
        assetMaterializations(limit: 1) { timestamp } } }""",
    "partitions": """{ assetNodeOrError(assetKey: {path: ["teacher_actions"]}) { ... on AssetNode {
        partitionKeysByDimension { name partitionKeys }
        assetPartitionStatuses { ... on DefaultPartitionStatuses { materializedPartitions } } } } }""",
    "history": """{ assetOrError(assetKey: {path: ["teacher_actions"]}) { ... on Asset {
        assetMaterializations(limit: 100) { partition timestamp metadataEntries { label
          ... on MarkdownMetadataEntry { mdStr }
          ... on TableMetadataEntry { table { records } } } } } } }""",
}
"""What the UI asks for to draw the asset graph, and an asset's pages."""


def slowest_page(url: str) -> float:
    """Seconds that the web server takes for the page that it takes longest for."""
    return max(timed(functools.partial(graphql, url, query))[1] for query in PAGES.values())


def backfill(root: Path) -> dict[str, float]:
    """A backfill of every batch, launched in the web server, with its pages looked at meanwhile.

    Nothing has changed, so the time is Dagster's: above all that of its daemon, which looks for new
    backfills twice a minute.
    """
    work = at(root)
    with served(work, root / "ui.log") as (url, _):
        return backfill_at(url, work)


def backfill_at(url: str, work: Pipeline) -> dict[str, float]:
    """A backfill of every batch in a web server that runs."""
    once_up(lambda: graphql(url, PAGES["graph"]))
    quiet = [slowest_page(url) for _ in range(3)]
    began = time.perf_counter()
    number = once_up(lambda: launch_backfill(url, work.batches(), ASSETS))
    busy = []
    while backfill_status(url, number) in ("REQUESTED", "STARTED"):
        busy.append(slowest_page(url))
        time.sleep(0.5)
    assert backfill_status(url, number) == "COMPLETED_SUCCESS"
    seconds = time.perf_counter() - began
    return {
        "backfill_of_unchanged_s": seconds,
        "slowest_page_s": min(quiet),
        "slowest_page_during_backfill_s": max(busy),
    }


def pss_mib(pid: int) -> float:
    """Memory of a process, what it shares counted by its part."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):  # it has ended in between
        return 0.0
    return next(float(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


MARKS = {"cpu_ms_per_batch_and_asset": 40.0, "click_to_success_s": 5.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true", help="30 batches instead of 1,000")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--batches", type=int, default=1000, help="how many partitions")
    arguments = parser.parse_args()
    is_small = arguments.small  # then one web server has to do for the clicks and the backfill
    n, n_clicks = (30, 1) if is_small else (arguments.batches, 5)
    figures: dict[str, float] = {"batches": n}
    with tempfile.TemporaryDirectory(prefix="orchestration-") as folder:
        for name, measure in (
            ("batches", lambda place: per_batch(place, n, with_backfill=not is_small)),
            ("clicks", lambda place: clicks(place, n_clicks, with_backfill=is_small)),
        ):
            place = Path(folder) / name
            place.mkdir()
            figures |= measure(place)
    for name, value in figures.items():
        mark = MARKS.get(name)
        verdict = "" if mark is None else f"<= {mark:g}  {'ok' if value <= mark else 'above'}"
        print(f"{name.replace('_', ' '):34s} {value:10.3f}  {verdict}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
