"""Connect the model's asset with the trainer process, through Dagster Pipes."""

from collections.abc import Callable
from dataclasses import replace

import dagster as dg

from replay_pipeline.assets.reporting import LiveCurves, whole_result
from replay_pipeline.assets.whole_lines import WholeLineReader
from replay_pipeline.orchestration.resources import PipelineResource
from replay_pipeline.stages.chain import stage_named
from replay_pipeline.stages.trainer_process import CURVES, TrainerJob, run_trainer
from replay_pipeline.types import Progress


def train_in_run(
    context: dg.AssetExecutionContext, pipeline: PipelineResource
) -> dg.MaterializeResult:
    """Train, and draw the metrics while it runs."""
    work = pipeline.open()
    receipt = work.train(launch=PipedTrainer(context))
    return whole_result(work, stage_named("train"), receipt)


class PipedTrainer:
    """The trainer in a Pipes session. Each step that it reports becomes a point of the live curves.

    A trainer without Pipes works too, but shows only its number of steps.
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
            self._context, dg.PipesTempFileContextInjector(), WholeLineReader()
        ) as session:
            told = {**job.environment, **session.get_bootstrap_env_vars()}
            run_trainer(replace(job, environment=told), tick)
        self._live.show(self._hear(session), is_last=True)

    def _hear(self, session: dg.PipesSession) -> dict[str, float]:
        """Return the newest value of every metric that the trainer has told so far."""
        messages = session.message_handler.get_custom_messages()
        for message in messages[self._n_heard :]:
            self._newest |= {
                name: value
                for name, value in message.get("metrics", {}).items()
                if name in CURVES or name == "step"
            }
        self._n_heard = len(messages)
        return self._newest
