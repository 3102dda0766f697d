"""Asset: the trained model. The trainer is a process of its own, heard through Dagster Pipes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import dagster as dg

from replay_pipeline.assets.partitions import GROUP, OWNERS
from replay_pipeline.assets.pictures import curve
from replay_pipeline.assets.reporting import LiveCurves, whole_result
from replay_pipeline.orchestration.resources import PipelineResource
from replay_pipeline.stages.pipeline import Pipeline, Receipt
from replay_pipeline.stages.trainer_process import CURVES, TrainerJob, run_trainer
from replay_pipeline.types import Progress


@dg.asset(
    deps=["published_dataset"],
    group_name=GROUP,
    owners=OWNERS,
    kinds={"pytorch", "huggingface"},
    tags={"stage": "train"},
    pool="training",
)
def trained_model(
    context: dg.AssetExecutionContext, pipeline: PipelineResource
) -> dg.MaterializeResult:
    """A model trained on the dataset with three channels: policy + α·SDPO + β·replay.

    Its metrics are drawn while it runs. Terminate asks it to save a checkpoint, from which the
    next run goes on bit for bit.
    """
    work = pipeline.open()
    receipt = work.train(launch=PipedTrainer(context))
    return whole_result(work, receipt, model_facts)


class PipedTrainer:
    """Runs the trainer in a Pipes session: each step it reports becomes a point of the live curves.

    A trainer that does not speak Pipes is run all the same, and shows its number of steps.
    """

    def __init__(self, context: dg.AssetExecutionContext) -> None:
        self._context = context
        self._live = LiveCurves(context)
        self._newest: dict[str, float] = {}
        self._n_heard = 0

    def __call__(self, job: TrainerJob, on_progress: Callable[[Progress], None]) -> None:
        """Run `job` to its end. Raises what `run_trainer` raises."""

        def tick(progress: Progress) -> None:
            on_progress(progress)
            steps = {"step": progress.n_done} if progress.n_done else {}
            self._live.show(steps | self._hear(session))

        with dg.open_pipes_session(
            self._context, dg.PipesTempFileContextInjector(), dg.PipesTempFileMessageReader()
        ) as session:
            told = {**job.environment, **session.get_bootstrap_env_vars()}
            run_trainer(replace(job, environment=told), tick)
        self._live.show(self._hear(session), is_last=True)

    def _hear(self, session: dg.PipesSession) -> dict[str, float]:
        """The newest value of every metric that the trainer has told so far."""
        messages = session.message_handler.get_custom_messages()
        for message in messages[self._n_heard :]:
            self._newest |= {
                name: value
                for name, value in message.get("metrics", {}).items()
                if name in CURVES or name == "step"
            }
        self._n_heard = len(messages)
        return self._newest


def model_facts(pipeline: Pipeline, receipt: Receipt) -> dict[str, Any]:
    """Losses, live channels, curves and the evaluation on held-out sessions."""
    report = receipt.report
    folder = pipeline.settings.model_dir().absolute()
    measured = ("prompt_gain_", "preference_", "blank_", "shuffled_", "consensus_")
    evaluation = {key: report[key] for key in sorted(report) if key.startswith(measured)}
    return {
        "dagster/uri": str(folder),
        "loss_first": report["loss_first"],
        "loss_last": report["loss_last"],
        "steps": report["steps"],
        "channels": ", ".join(report["channels_live"]),
        **{f"{name} by step": curve(name, line) for name, line in report.get("curves", {}).items()},
        "card": dg.MetadataValue.path(str(folder / "README.md")),
        "log": dg.MetadataValue.path(str(folder / "trainer.log")),
        **evaluation,
    }
