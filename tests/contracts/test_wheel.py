"""The wheel holds what a user runs, and nothing that only tests or the docs need."""

import tomllib
from pathlib import Path

import grimp

import trainer
from trainer import __main__ as command
from trainer import diloco

STARTED = (
    "replay_pipeline",
    "replay_pipeline.cli.__main__",
    "replay_pipeline.assets.definitions",
    "replay_pipeline.stages.work.replay_train",
    "trainer",
    "trainer.__main__",
    "trainer.diloco",
)
"""Where a user or Dagster comes in by an import."""

LOADED_BY_NAME = {
    "replay_pipeline.assets.serve": "the process behind `replay-pipeline ui`",
    "replay_pipeline.publish.hub": "publish/version.py, once a repository is named",
    "replay_pipeline.assets.supervise": "the first process of a container",
    "replay_pipeline.testing.__main__": "the process of `TeacherServer`",
    "trainer.engines.openenv.client": "recipes/openenv",
    "trainer.engines.prime_rl.register": "an entry point",
    "trainer.engines.verifiers.taskset": "recipes/verifiers",
    "trainer.engines.verl.agent_loop": "the settings of VeRL",
    "trainer.engines.verl.reward": "the settings of VeRL",
}
"""What an outside program, or one of ours in another process, loads by its name."""


def test_every_module_of_the_wheel_is_one_that_a_user_can_reach():
    graph = grimp.build_graph("replay_pipeline", "trainer")
    reached: set[str] = set()
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    points = [p for group in project["project"]["entry-points"].values() for p in group.values()]
    later = {*trainer._HOMES.values(), *(f"trainer.diloco.{one}" for one in diloco._HOMES.values())}
    points += [*later, *command.COMMANDS.values()]
    for start in (*STARTED, *LOADED_BY_NAME, *(point.partition(":")[0] for point in points)):
        reached |= {start} | graph.find_upstream_modules(start)
    for module in list(reached):
        parts = module.split(".")
        reached |= {".".join(parts[:n]) for n in range(1, len(parts))}
    assert sorted(graph.modules - reached) == []


def test_what_is_loaded_by_name_exists():
    graph = grimp.build_graph("replay_pipeline", "trainer")
    assert set(LOADED_BY_NAME) <= graph.modules
