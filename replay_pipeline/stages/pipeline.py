"""The whole pipeline as plain calls, one method per stage. Start reading here.

Dagster and the command line only schedule these calls. Each stage has its own file in this folder,
which says what it does, reads, and depends on. `replay_pipeline.stages.engine` runs them.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from replay_pipeline.errors import ConfigError, ReplayPipelineError
from replay_pipeline.ingesters import read_manifest
from replay_pipeline.judge.extract import extract_dpo_pairs
from replay_pipeline.normalize import DJNormalizer
from replay_pipeline.replay import replay_trace
from replay_pipeline.settings import DEFAULT_TEACHERS, Settings
from replay_pipeline.stages import chain, engine
from replay_pipeline.stages.budget.spending import replay_within
from replay_pipeline.stages.normalize import normalizer_of
from replay_pipeline.stages.pairs import checked_pairs
from replay_pipeline.stages.project import OnProgress, Project
from replay_pipeline.stages.publish import retract_rows
from replay_pipeline.stages.receipts import Receipt, now
from replay_pipeline.stages.staleness import reasons_by_batch
from replay_pipeline.stages.train import trainer_config
from replay_pipeline.stages.views.doctor import require_extras, require_trainer
from replay_pipeline.stages.views.summary import summary_of
from replay_pipeline.stages.work.discovery import find_batches, keep_bytes
from replay_pipeline.stages.work.trainer_process import Launch, run_trainer
from replay_pipeline.types import (
    NormalizedDPOPair,
    Progress,
    TeacherAction,
    TeacherSpec,
    TraceState,
)

logger = logging.getLogger(__name__)


class Pipeline(Project):
    """The stages over one data root. Call them in any order in which their inputs exist."""

    failed: Mapping[str, str] = {}
    """Why a batch could not be ingested, by batch."""

    find_batches = find_batches
    replay_within = replay_within
    retract = retract_rows

    def ingest_new(self) -> list[str]:
        """Find new sessions, ingest every batch that isn't yet, and return all ingested batches.

        `failed` says why the other batches failed.

        Raises:
            ConfigError: there is no session at all.
            ReplayPipelineError: every batch failed. This is the error of the last one.
        """
        self.find_batches()
        batches, manifests = self.batches(), self.manifests()
        if not batches:
            sources = ", ".join(map(str, self.settings.ingest.sources))
            raise ConfigError(
                f"no session found in {sources or 'the folder of Claude Code'}: "
                "name a folder or a .jsonl file"
            )
        self.failed = {}
        done = {receipt.batch for receipt in self.receipts.all(stage="ingest")}
        new = [each for each in manifests if each.key not in done]
        n_bytes = sum(each.n_bytes for each in new)
        self.on_progress(Progress(stage="ingest", n_done=0, n_total=n_bytes, unit="bytes"))
        for batch, manifest in zip(batches, manifests, strict=True):
            try:
                keep_bytes(self, manifest)
                engine.do(chain.stage_named("ingest"), self, batch)
            except Exception as error:
                # The next batch has other files; what is wrong with this one is told at the end.
                is_ours = isinstance(error, ReplayPipelineError)
                logger.error("%s: cannot be ingested: %s", batch, error, exc_info=not is_ours)
                self.failed[batch] = str(error)
                if len(self.failed) == len(batches):
                    raise
        return [batch for batch in batches if batch not in self.failed]

    def ingest(self, batch: str) -> Receipt:
        """Read the sessions of a batch: see `stages.ingest`."""
        keep_bytes(self, read_manifest(batch, self.root.path))
        return engine.do(chain.stage_named("ingest"), self, batch)

    def replay(
        self, batch: str, *, max_total_usd: float | None = None, night: str | None = None
    ) -> Receipt:
        """Ask teachers at the states of a batch: see `stages.replay`.

        Args:
            batch: the batch.
            max_total_usd: the ceiling for new answers, by default from the settings. With 0, only
                answers from the ledger are used.
            night: date of the night whose budget pays.
        """
        return engine.do(
            chain.stage_named("replay").told_to(max_total_usd=max_total_usd, night=night),
            self,
            batch,
        )

    def pairs(self, batch: str) -> Receipt:
        """Make pairs of the answers at a batch's states: see `stages.pairs`."""
        return engine.do(chain.stage_named("pairs"), self, batch)

    def normalize(self, batch: str) -> Receipt:
        """Keep the pairs of a batch that are fit to publish: see `stages.normalize`."""
        return engine.do(chain.stage_named("normalize"), self, batch)

    def publish(self) -> Receipt:
        """Publish all normalized pairs as one dataset: see `stages.publish`."""
        return engine.do(chain.stage_named("publish"), self)

    def train(self, *, launch: Launch = run_trainer) -> Receipt:
        """Train on the published dataset, in a process that `launch` starts: see `stages.train`."""
        if launch is run_trainer:
            require_trainer()
        return engine.do(chain.stage_named("train").told_to(launch=launch), self)

    def check_settings(self) -> None:
        """Check the settings of later stages before the replay is paid for.

        Raises:
            ConfigError: a recipe, marks file, or trainer config is wrong, or there is no folder for
                the files that must be on this machine.
        """
        self.settings.ledger_url()
        normalizer_of(self)
        checked_pairs(self.settings)
        trainer_config(self.settings)


def run(
    settings: Settings,
    *,
    with_training: bool = True,
    since: str | None = None,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Find new sessions, take every batch through all stages, and return the summary.

    All batches of the run share one budget.

    Args:
        settings: the settings of the stages.
        with_training: whether to train on the dataset at the end.
        since: when the run began, as an ISO time in UTC. By default, now.
        on_progress: called with the progress of long work.

    Raises:
        ConfigError: a setting is wrong, or no session was found. Nothing was paid.
        MissingDependencyError: an extra that a stage needs isn't installed. Nothing was paid.
    """
    pipeline = Pipeline(settings, on_progress=on_progress)
    since = since or now()
    require_extras(settings, with_training=with_training)
    pipeline.check_settings()
    batches = pipeline.ingest_new()
    replay = pipeline.replay_within(batches=batches)
    for batch in batches:
        for stage in chain.by_batch()[1:]:
            do = replay if stage.name == "replay" else partial(engine.do, stage, pipeline)
            do(batch)
    for stage in chain.STAGES:
        if not stage.is_by_batch and (with_training or stage.name != "train"):
            engine.do(stage, pipeline)
    return {
        **summary_of(pipeline, since=since),
        "failed_batches": dict(pipeline.failed),
        "stale": reasons_by_batch(pipeline, chain.STAGES),
    }


async def replay_and_normalize_trace(
    states: Iterable[TraceState],
    teachers: Sequence[TeacherSpec] = DEFAULT_TEACHERS,
    agreement_threshold: int = 2,
    max_total_usd: float = 10.0,
    *,
    recipe: str | Path = "default",
    ledger: str | Path | None = None,
) -> tuple[list[TeacherAction], list[NormalizedDPOPair]]:
    """Ask the teachers at every state, and keep the pairs that pass the recipe.

    >>> from replay_pipeline.testing import TeacherServer
    >>> import json
    >>> def bash(command):
    ...     function = {"name": "Bash", "arguments": json.dumps({"command": command})}
    ...     return {"tool_calls": [{"id": "c1", "type": "function", "function": function}]}
    >>> states = [
    ...     {
    ...         "state_id": "step-1",
    ...         "messages": [{"role": "user", "content": "A test of the parser fails. What now?"}],
    ...         "student_action": {"role": "assistant", **bash("git push")},
    ...         "outcome": "user_rejected",
    ...     }
    ... ]
    >>> with TeacherServer(script=bash("cat tests/test_parser.py")) as server:
    ...     asked = replay_and_normalize_trace(states, server.teachers(), ledger="ledger.sqlite")
    ...     actions, pairs = asyncio.run(asked)
    >>> len(actions), [pair["chosen"] for pair in pairs]
    (3, ['Bash {"command":"cat tests/test_parser.py"}'])

    Args:
        states: decision points of recorded sessions.
        teachers: models to ask.
        agreement_threshold: how many model families must agree to make a consensus.
        max_total_usd: hard ceiling for new answers, in US dollars.
        recipe: bundled data-juicer recipe by name, or a path.
        ledger: path or URL of the ledger; by default under the data root.

    Raises:
        ConfigError: a teacher, the recipe, or the threshold is wrong. Nothing was paid.
        ReplayError: the ledger can't be used, or a price isn't known.
    """
    states = list(states)
    extract_dpo_pairs([], [], agreement_threshold)  # refuses a wrong threshold before any cost
    normalizer = await asyncio.to_thread(DJNormalizer, recipe)
    actions = await replay_trace(states, teachers, max_total_usd, ledger=ledger)
    pairs = extract_dpo_pairs(states, actions, agreement_threshold)
    normalized = await asyncio.to_thread(normalizer.normalize, pairs)
    return actions, normalized


def replay_and_normalize_trace_sync(
    states: Iterable[TraceState],
    teachers: Sequence[TeacherSpec] = DEFAULT_TEACHERS,
    agreement_threshold: int = 2,
    max_total_usd: float = 10.0,
    *,
    recipe: str | Path = "default",
    ledger: str | Path | None = None,
) -> tuple[list[TeacherAction], list[NormalizedDPOPair]]:
    """Call `replay_and_normalize_trace` without an event loop. Raises the same errors.

    >>> replay_and_normalize_trace_sync([], max_total_usd=0.0, ledger="ledger.sqlite")
    ([], [])
    """
    return asyncio.run(
        replay_and_normalize_trace(
            states, teachers, agreement_threshold, max_total_usd, recipe=recipe, ledger=ledger
        )
    )
