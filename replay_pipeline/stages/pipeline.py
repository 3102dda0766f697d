"""The whole pipeline as plain calls. Start reading here; Dagster and the CLI only schedule these.

Every stage reads tables, calls one library function, writes tables, and leaves a receipt: what it
was given (a fingerprint), what it did (its report) and how long it took. A stage whose fingerprint
has not changed hands back its receipt and does nothing, so any run may be repeated at no cost.
"""

import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from replay_pipeline.errors import ConfigError
from replay_pipeline.ingesters import (
    LazyStates,
    TraceBatch,
    Traces,
    discover,
    ingest,
    list_batches,
    list_manifests,
    read_manifest,
    write_manifest,
)
from replay_pipeline.normalize import DJNormalizer
from replay_pipeline.pairs import (
    extract_pairs,
    outcomes_table,
    pairs_of,
    pairs_table,
    positives_table,
)
from replay_pipeline.publish import (
    CardFacts,
    PublishReport,
    TeacherFacts,
    fetch,
    publish,
    retract,
    to_be_published,
)
from replay_pipeline.replay import (
    Estimate,
    check_teachers,
    control,
    estimate_sync,
    has_ledger,
    ledger_status,
    refuse_if_nobody_answers,
    replay_batch_in_thread,
    replay_facts,
    replay_in_thread,
    spent_since,
)
from replay_pipeline.replay.rows import teacher_actions_from_table, teacher_actions_table
from replay_pipeline.review import apply_marks, rank_pairs, read_marks, show_state, write_review
from replay_pipeline.settings import Settings, api_key, redaction_salt
from replay_pipeline.stages.audit import refuse_unfit
from replay_pipeline.stages.dedup_index import DedupIndex
from replay_pipeline.stages.doctor import examine
from replay_pipeline.stages.receipts import Receipt, Receipts
from replay_pipeline.stages.summary import BATCH_STAGES, summarize, summarize_night
from replay_pipeline.stages.trainer_process import (
    TRAINER_LOCK,
    Launch,
    TrainerJob,
    run_trainer,
    training_curves,
)
from replay_pipeline.storage.folds import Pass
from replay_pipeline.storage.pair_rows import PromptsOf
from replay_pipeline.storage.schemas import SCHEMA_VERSION, WRITTEN_BY
from replay_pipeline.storage.store import check_reachable, copy_files, files_below, is_local
from replay_pipeline.storage.tables import DataRoot, table_of
from replay_pipeline.testing import TeacherServer
from replay_pipeline.testing.sample import ANSWERS_FILE
from replay_pipeline.types import DPOPair, Progress, ReplayReport, TeacherSpec, TraceState

logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_S, _SAMPLE_POLL_S = 30.0, 0.1
"""Seconds between two looks at a batch that was handed in."""

_PLANNED_ABOVE_BUDGET = 1.25
"""Estimates are rough: plan for a little more than there is, so that no money is left over."""

OnProgress = Callable[[Progress], None]

_ToolRow = tuple[str, str | None, str]
"""Name, release series and definition of a tool."""


class Pipeline:
    """The stages over one data root. Methods may be called in any order that has its inputs.

    Args:
        settings: everything the stages are told.
        on_progress: called as long work moves on.

    Raises:
        StorageError: the data root is on an object store that cannot be reached.
    """

    def __init__(self, settings: Settings, *, on_progress: OnProgress | None = None) -> None:
        self.settings = settings
        check_reachable(settings.data_dir)
        self.root = DataRoot(settings.data_dir)
        self.receipts = Receipts(settings.data_dir)
        self._on_progress = on_progress or _ignore
        self._keys: list[str] | None = None
        self._seen_states = self._pass("states", set[str], _with_ids)
        self._seen_tools = self._pass("tools", dict[_ToolRow, int], _with_tools)
        self._seen_pairs = Pass(
            self.batches,
            start=str,
            add=lambda value, key: _hash([value, key, *self._digests(key, ("dpo_pairs",))]),
        )

    # Batches

    def find_batches(self, *, settle_s: float = 0.0) -> list[TraceBatch]:
        """Group new session bytes into batches and write their manifests. Returns the new ones.

        Files written to less than `settle_s` seconds ago are left for the next time.
        """
        options = self.settings.ingest
        new = discover(
            options.sources,
            known=list_manifests(self.root.path),
            max_batch_bytes=options.max_batch_bytes,
            max_batch_sessions=options.max_batch_sessions,
            settle_s=settle_s,
        )
        for batch in new:
            write_manifest(batch, self.root.path)
        self._keys = None
        return new

    def batches(self) -> list[str]:
        """Keys of all batches that have a manifest, in order.

        They are listed once; `find_batches` looks again, and so does a new `Pipeline`.
        """
        if self._keys is None:
            self._keys = list_batches(self.root.path)
        return self._keys

    def fitting(self, batches: Sequence[str], *, max_usd: float) -> list[str]:
        """The first of `batches` that `max_usd` is likely to pay for, by what others have cost.

        Costs are taken to grow with the bytes of the sessions. At least one batch is given, and all
        as long as none was paid for. It is a plan only: what holds the ceiling is the replay.
        """
        sizes = {b.key: b.n_bytes for b in list_manifests(self.root.path)}
        reports = self._reports("replay")
        done = [key for key, report in reports.items() if report["is_complete"] and key in sizes]
        spent_usd = sum(reports[key]["spent_usd"] for key in done)
        n_bytes = sum(sizes[key] for key in done)
        if not (spent_usd and n_bytes):
            return list(batches)
        chosen: list[str] = []
        left_usd = max_usd * _PLANNED_ABOVE_BUDGET
        for key in batches:
            if chosen and left_usd <= 0:
                break
            paid_usd = reports.get(key, {}).get("spent_usd", 0.0)
            left_usd -= max(0.0, spent_usd / n_bytes * sizes.get(key, 0) - paid_usd)
            chosen.append(key)
        return chosen

    def ingest_new(self) -> list[str]:
        """Find new sessions and ingest every batch that is not. Returns all batches.

        Raises:
            ConfigError: there is no session at all.
        """
        self.find_batches()
        batches = self.batches()
        if not batches:
            sources = ", ".join(map(str, self.settings.ingest.sources))
            raise ConfigError(
                f"no session found in {sources or 'the folder of Claude Code'}: "
                "name a folder or a .jsonl file"
            )
        for batch in batches:
            self.ingest(batch)
        return batches

    # Stages

    def ingest(self, batch: str) -> Receipt:
        """Sessions of a batch to `sessions`, `turns`, `states` and `tools`.

        Raises:
            IngestError: a file of the batch is gone or unreadable.
        """
        manifest = read_manifest(batch, self.root.path)
        options = self.settings.ingest
        given = [f"{options.is_redacted}", f"{options.is_project_hashed}", manifest.to_json()]

        def work() -> dict[str, Any]:
            result = ingest(
                manifest.slices,
                redact=self.settings.ingest.is_redacted,
                hash_project=self.settings.ingest.is_project_hashed,
                known_state_ids=self._seen_states.before(batch),
                salt=redaction_salt(),
                on_progress=self._on_progress,
            )
            for name in ("sessions", "turns", "states", "tools"):
                self._write(name, batch, getattr(result, name))
            return result.report.to_json()

        return self._stage("ingest", batch, given, ("sessions", "turns", "states", "tools"), work)

    def estimate(self, batches: Sequence[str] | None = None) -> Estimate:
        """What replaying `batches` (by default all) would cost, without what is already paid."""
        with self._teachers() as teachers:
            return estimate_sync(
                self._states(batches or self.batches()),
                teachers,
                ledger=self.settings.ledger_url(),
                gates=self.settings.replay.gates,
                agreement_threshold=self.settings.pairs.agreement_threshold,
                level=self.settings.pairs.level,
                accepted_terms=self.settings.replay.accepted_terms,
                price_folder=self._price_folder(),
            )

    def replay(self, batch: str, *, max_usd: float | None = None) -> Receipt:
        """States of a batch to `teacher_actions`, paying at most `max_usd` for new answers.

        A stage that stopped before every question was asked is not final: the next call goes on.

        Raises:
            ConfigError: the budget is not above 0, or a teacher cannot be used.
        """
        budget_usd = _above_0(self.settings.replay.max_total_usd if max_usd is None else max_usd)
        replay = self.settings.replay
        given = [
            *(t.model_dump_json(exclude={"base_url", "price"}) for t in replay.teachers),
            json.dumps([replay.gates, self.settings.ingest.window]),
            *([self.settings.pairs.model_dump_json(exclude={"marks"})] if replay.gates else []),
            *(["sample"] if replay.sample_teachers else []),
            *self._state_digests(batch),
        ]

        def work() -> dict[str, Any]:
            with self._teachers() as teachers:
                report = replay_in_thread(
                    self._states([batch]),
                    teachers,
                    max_total_usd=budget_usd,
                    counts_recorded=False,
                    max_concurrency=replay.max_concurrency,
                    partition=batch,
                    gates=replay.gates,
                    agreement_threshold=self.settings.pairs.agreement_threshold,
                    level=self.settings.pairs.level,
                    count_own_family=self.settings.pairs.count_own_family,
                    accepted_terms=replay.accepted_terms,
                    tick=self._on_progress,
                    **self._accounts(),
                )
            self._write("teacher_actions", batch, teacher_actions_table(report.actions))
            refuse_if_nobody_answers(report)
            return replay_facts(report)

        return self._stage(
            "replay",
            batch,
            given,
            ("teacher_actions",),
            work,
            is_final=lambda report: report["is_complete"],
        )

    def hand_in(self, batches: Sequence[str]) -> ReplayReport:
        """Ask by batch API, at half the price and within a day, and wait for the answers.

        They are kept in the ledger; `replay` takes them from there. Stopped while it waits, it
        leaves what was handed in running, and the next call takes the answers over.

        Raises:
            ConfigError: the budget is not above 0, or a teacher has no batch API.
            TeacherError: an endpoint did not take a batch, or can't be reached.
        """
        replay = self.settings.replay
        with self._teachers() as teachers:
            return replay_batch_in_thread(
                self._states(batches),
                teachers,
                max_total_usd=_above_0(replay.max_total_usd),
                counts_recorded=False,
                accepted_terms=replay.accepted_terms,
                poll_s=_SAMPLE_POLL_S if replay.sample_teachers else _POLL_S,
                **self._accounts(),
            )

    def replay_within(self, max_usd: float | None = None) -> Callable[[str], Receipt]:
        """`replay` under one ceiling for all batches: what one pays is not there for the next.

        Calls with an unknown outcome count as paid. Without `max_usd` the ceiling is the setting.
        """
        left_usd = self.settings.replay.max_total_usd if max_usd is None else max_usd

        def replay(batch: str) -> Receipt:
            nonlocal left_usd
            receipt = self.replay(batch, max_usd=left_usd)
            if not receipt.is_reused:
                paid_usd = receipt.report["newly_spent_usd"] + receipt.report["unknown_usd"]
                # Never 0, which would be refused as a mistake: the rest buys nothing more.
                left_usd = max(left_usd - paid_usd, 1e-9)
            return receipt

        return replay

    def pairs(self, batch: str) -> Receipt:
        """States and teacher actions of a batch to `dpo_pairs`, `positives` and `outcomes`."""
        marks = read_marks(self.settings.pairs.marks) if self.settings.pairs.marks else {}
        given = [
            self.settings.pairs.model_dump_json(exclude={"marks"}),
            json.dumps(marks, sort_keys=True),
            self.settings.ingest.window,
            *self._state_digests(batch),
            *self._digests(batch, ("teacher_actions",)),
        ]

        def work() -> dict[str, Any]:
            answers = teacher_actions_from_table(self.root.read("teacher_actions", batch))
            report = extract_pairs(
                self._states([batch]),
                answers,
                self.settings.pairs.agreement_threshold,
                level=self.settings.pairs.level,
                include_natural=self.settings.pairs.include_natural,
                count_own_family=self.settings.pairs.count_own_family,
            )
            pairs = apply_marks(report.pairs, marks)
            self._write("dpo_pairs", batch, pairs_table(pairs))
            self._write("positives", batch, positives_table(report.positives))
            self._write("outcomes", batch, outcomes_table(report.outcomes))
            write_review(pairs, path=self.review_path(batch), outcomes=report.outcomes, title=batch)
            return {
                **report.to_json(),
                "n_pairs": len(pairs),
                "n_rejected_in_review": len(report.pairs) - len(pairs),
                "n_consensus": sum(report.consensus_levels.values()),
                "n_agreement": report.outcome_counts.get("agreement", 0),
            }

        return self._stage(
            "pairs",
            batch,
            given,
            ("dpo_pairs", "positives", "outcomes"),
            work,
            has_outputs=self.review_path(batch).exists,
        )

    def normalize(self, batch: str) -> Receipt:
        """Pairs of a batch to `normalized_pairs` and `dropped_pairs`, through data-juicer."""
        normalizer = self._normalizer
        given = [
            normalizer.fingerprint,
            self._seen_pairs.before(batch),
            self.settings.ingest.window,
            *self._state_digests(batch),
            *self._digests(batch, ("dpo_pairs",)),
        ]

        def work() -> dict[str, Any]:
            table = self.root.read("dpo_pairs", batch)
            result = normalizer.run(
                table, prompts=self._prompts(batch), index=self._dedup_index.of(batch)
            )
            self._write("normalized_pairs", batch, result.kept)
            self._write("dropped_pairs", batch, result.dropped)
            return result.report.to_json()

        return self._stage("normalize", batch, given, ("normalized_pairs", "dropped_pairs"), work)

    def publish(self) -> Receipt:
        """All normalized pairs to one dataset folder, and to the Hub if a repository is set.

        Raises:
            ConfigError: there is nothing to publish yet.
            SecretFoundError: a secret is in the data; nothing was published.
            CheckFailedError: a batch breaks a contract; nothing was published.
        """
        batches = self._batches_with("normalized_pairs")
        options = self.settings.publish
        given = [options.model_dump_json(), str(self.settings.dataset_dir())]
        for batch in batches:
            given += self._digests(batch, ("normalized_pairs", "positives"))
            given += [self.settings.ingest.window, *self._state_digests(batch)]
        facts = self._card_facts()
        given.append(json.dumps(facts, sort_keys=True, default=str))

        place = self.settings.dataset_dir()

        def work() -> dict[str, Any]:
            refuse_unfit(self.root, batches)
            with to_be_published(place, self._dataset_copy()) as folder:
                report = publish(
                    ((batch, self.root.read("normalized_pairs", batch)) for batch in batches),
                    positives=((batch, self.root.read("positives", batch)) for batch in batches),
                    prompts=self._prompts,
                    folder=folder,
                    repo_id=options.repo_id,
                    private=options.is_private,
                    test_fraction=options.test_fraction,
                    card_facts=facts,
                )
            return report.to_json()

        return self._stage("publish", "all", given, (), work, has_outputs=place.exists)

    def retract(
        self,
        *,
        session_ids: Sequence[str] = (),
        batches: Sequence[str] = (),
        erase: bool = False,
    ) -> PublishReport:
        """Take sessions or batches out of the published dataset, for good.

        They stay out of every later publication; the pipeline's own tables keep them.

        Args:
            session_ids: sessions, of any batch.
            batches: whole batches.
            erase: also forget the history of the Hub dataset.

        Raises:
            ConfigError: nothing is named, or there is no dataset.
            PublishError: the Hub refused; the folder has the new version, the Hub the old one.
        """
        place = self.settings.dataset_dir()
        if not (session_ids or batches):
            raise ConfigError("nothing to retract: name a session or a batch")
        if not place.exists():
            raise ConfigError(f"{place}: no dataset yet, so there is nothing to take out of it")
        with to_be_published(place, self._dataset_copy()) as folder:
            return retract(
                folder=folder,
                session_ids=session_ids,
                batches=batches,
                repo_id=self.settings.publish.repo_id,
                erase=erase,
            )

    def train(self, *, launch: Launch = run_trainer) -> Receipt:
        """The published dataset to a trained model, in a process of its own that `launch` runs.

        A training that was stopped or killed goes on from its last checkpoint.

        Raises:
            TrainError: the trainer failed; the message ends with its last words.
        """
        config = self._trainer_config()
        output, kept = self.settings.training_dir(), self.settings.model_dir()
        dataset = fetch(self.settings.dataset_dir(), self._dataset_copy())
        given = [config.read_text("utf-8") if config else "tiny"]
        given += [f"{p.name}:{_digest(p)}" for p in sorted(dataset.rglob("*.parquet"))]
        command = [sys.executable, "-m", "trainer", "--resume"]
        command += ["--config", str(config)] if config else []
        command += ["--set", f"dataset={dataset}", "--set", f"output={output}"]

        def work() -> dict[str, Any]:
            if not dataset.exists():
                place = self.settings.dataset_dir()
                raise ConfigError(f"{place}: no dataset yet; run `replay-pipeline publish` first")
            # The bundled run is for one core: more threads than free cores only wait for each other.
            job = TrainerJob(
                command=command,
                output=output,
                environment={} if config else {"OMP_NUM_THREADS": "1"},
                stop_timeout_s=self.settings.train.stop_timeout_s,
            )
            launch(job, self._on_progress)
            report = json.loads((output / "report.json").read_text("utf-8"))
            if kept != output:
                copy_files(output, kept, [n for n in files_below(output) if n != TRAINER_LOCK])
            return {**report, "curves": training_curves(output / "metrics.jsonl")}

        return self._stage(
            "train", "all", given, (), work, has_outputs=(kept / "report.json").exists
        )

    # Looking

    def completed_batches(self) -> set[str]:
        """Batches at which every question has its answer; the others go on in the next run."""
        return {batch for batch, report in self._reports("replay").items() if report["is_complete"]}

    def check_settings(self) -> None:
        """Find what later stages would refuse, before the replay is paid for.

        Raises:
            ConfigError: a recipe, marks file or trainer config is wrong, or there is no folder for
                what must be on this machine.
        """
        self.settings.ledger_url()
        _ = self._normalizer
        if self.settings.pairs.marks is not None:
            read_marks(self.settings.pairs.marks)
        self._trainer_config()

    def check_keys(self) -> None:
        """See that every teacher's key is there, before anything is asked or even priced.

        Raises:
            ConfigError: a key is missing.
        """
        if not self.settings.replay.sample_teachers:
            for teacher in self.settings.replay.teachers:
                api_key(teacher.api_key_env)

    def check_teachers(self) -> list[dict[str, Any]]:
        """Each teacher: key, endpoint, price, terms, and what is wrong with it."""
        with self._teachers() as teachers:
            checks = check_teachers(teachers, price_folder=self._price_folder())
        return [check.to_json() for check in checks]

    def status(self) -> dict[str, Any]:
        """What is done for each batch, what it cost, and what the ledger holds."""
        done = {(r.stage, r.batch): r.report for r in self.receipts.all()}
        figure = {"ingest": "n_states", "replay": "n_answers", "pairs": "n_pairs"}
        batches = {
            key: {
                stage: done[stage, key].get(figure.get(stage, "n_kept"))
                for stage in BATCH_STAGES
                if (stage, key) in done
            }
            for key in self.batches()
        }
        url = self.settings.ledger_url()
        ledger = {"ledger": "none yet", "spent_usd": 0.0, "held_usd": 0.0, "unknown_usd": 0.0,
                  "calls": {}}  # fmt: skip
        if has_ledger(url):
            ledger = ledger_status(url).to_json()
        return {
            "batches": batches,
            "teachers": [t.name for t in self.settings.replay.teachers],
            "is_sample": self.settings.replay.sample_teachers,
            "ledger": ledger,
            "other_ledger_usd": self._other_ledger_usd(),
            "dataset": done.get(("publish", "all")),
        }

    def _other_ledger_usd(self) -> float | None:
        """What the sample's ledger holds when real teachers are set, or the other way round."""
        if self.settings.replay.ledger is not None:
            return None
        is_sample = self.settings.replay.sample_teachers
        changed = self.settings.replay.model_copy(update={"sample_teachers": not is_sample})
        other = self.settings.model_copy(update={"replay": changed}).ledger_url()
        return ledger_status(other).spent_usd if has_ledger(other) else None

    def show(self, state_id: str) -> str:
        """One state as text: what came before, the student's action, each teacher's answer.

        Raises:
            ConfigError: no state, or more than one, begins with `state_id`.
        """
        batches = [
            batch
            for batch in self.root.batches("states")
            if any(
                known.startswith(state_id)
                for known in self.root.read("states", batch)["state_id"].to_pylist()
            )
        ]
        answered = [batch for batch in batches if self.root.has("teacher_actions", batch)]
        paired = [batch for batch in batches if self.root.has("dpo_pairs", batch)]
        return show_state(
            state_id,
            states=self._states(batches),
            teacher_actions=[
                row
                for batch in answered
                for row in teacher_actions_from_table(self.root.read("teacher_actions", batch))
            ],
            pairs=[p for p in self._pairs(paired) if p["state_id"].startswith(state_id)],
            outcomes=[row for b in paired for row in self.root.read("outcomes", b).to_pylist()],
        )

    def review(self, path: Path | None = None) -> Path:
        """Write the page that shows all pairs side by side. Returns where it is.

        Raises:
            ConfigError: no batch has come as far as pairs.
        """
        return write_review(
            self._pairs(self._batches_with("dpo_pairs")),
            path=path or self.root.path / "review.html",
            outcomes=self.root.read_all("outcomes").to_pylist(),
        )

    def sample_pairs(self, batch: str, n_pairs: int) -> list[DPOPair]:
        """The first pairs of a batch, with their prompts."""
        rows = self.root.read("dpo_pairs", batch).slice(0, n_pairs)
        return list(pairs_of(rows, self._prompts(batch)))

    def ranked_pairs(self) -> list[Mapping[str, Any]]:
        """Rows of all pairs, those first that are most worth a person's look.

        Raises:
            ConfigError: no batch has come as far as pairs.
        """
        self._batches_with("dpo_pairs")
        return rank_pairs(self.root.read_all("dpo_pairs").to_pylist())

    def review_path(self, batch: str) -> Path:
        """Where the review page of one batch is, written together with its pairs."""
        return self.root.path / "review" / f"{batch}.html"

    def examine(self) -> list[dict[str, Any]]:
        """Check this machine and these settings. One finding each: what, whether ok, detail."""
        return examine(self.settings, self.check_teachers())

    def summary(self, *, since: Mapping[tuple[str, str], object]) -> dict[str, Any]:
        """The figures of all stages; what was done after `since` counts as done now."""
        figures = summarize(self.receipts.all(since=since))
        figures["budget_usd"] = self.settings.replay.max_total_usd
        figures["dataset"] = str(self.settings.dataset_dir())
        return figures

    def night(self, *, since: datetime, failures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What was done since then, and what is still open; `failures` are runs that failed."""
        return summarize_night(
            self.receipts.all(),
            since=since,
            spent_usd=spent_since(self.settings.ledger_url(), since),
            budget_usd=self.settings.replay.max_nightly_usd,
            n_open=len(set(self.batches()) - self.completed_batches()),
            failures=failures,
        )

    def control(self, *, max_usd: float, n_states: int = 50) -> Receipt:
        """Ask the students' own models again: how often do they leave their recorded action?

        A sample of states is enough. The figure goes into the dataset card.

        Raises:
            ConfigError: the teachers are the sample's, whose server does not play the students.
        """
        if self.settings.replay.sample_teachers:
            raise ConfigError(
                "the sample has no answers of its students: a control run needs real endpoints "
                "(REPLAY_TEACHERS=openrouter)"
            )
        started = time.perf_counter()
        report = control(
            self._states(self.batches()),
            max_total_usd=max_usd,
            n_states=n_states,
            level=self.settings.pairs.level,
            teacher=self.settings.replay.student,
            tick=self._on_progress,
            **self._accounts(),
        )
        return self.receipts.write(
            Receipt(
                stage="control",
                batch="all",
                fingerprint="",
                report=report.to_json(),
                seconds=round(time.perf_counter() - started, 3),
            )
        )

    # What the stages share

    def _stage(
        self,
        stage: str,
        batch: str,
        given: Iterable[str],
        outputs: Sequence[str],
        work: Callable[[], dict[str, Any]],
        *,
        is_final: Callable[[dict[str, Any]], bool] = lambda _: True,
        has_outputs: Callable[[], bool] = lambda: True,
    ) -> Receipt:
        fingerprint = _hash([stage, SCHEMA_VERSION, *given])
        last = self.receipts.read(stage, batch)
        if (
            last is not None
            and last.fingerprint == fingerprint
            and is_final(last.report)
            and has_outputs()
            and all(self.root.has(name, batch) for name in outputs)
        ):
            logger.info("%s %s: nothing has changed", stage, batch)
            return last
        started = time.perf_counter()
        report = work()
        seconds = round(time.perf_counter() - started, 3)
        logger.info("%s %s: done in %.1f s", stage, batch, seconds)
        return self.receipts.write(
            Receipt(
                stage=stage, batch=batch, fingerprint=fingerprint, report=report, seconds=seconds
            )
        )

    @contextmanager
    def _teachers(self) -> Iterator[tuple[TeacherSpec, ...]]:
        if not self.settings.replay.sample_teachers:
            yield self.settings.replay.teachers
            return
        with TeacherServer(ANSWERS_FILE) as server:
            yield server.teachers()

    def _states(self, batches: Iterable[str]) -> Sequence[TraceState]:
        keys = list(batches)
        sizes = [self.root.n_rows("states", key) for key in keys]
        return LazyStates(
            sizes,
            lambda number: self._traces(keys[number]),
            window=self.settings.ingest.window,
        )

    def _traces(self, batch: str) -> Traces:
        tables = {name: self.root.read(name, batch) for name in ("sessions", "turns", "states")}
        # Reading takes twice what the tables hold, and Arrow would keep it for the next time.
        pa.default_memory_pool().release_unused()
        return Traces(**tables, tools=self._tools_until(batch))

    def _prompts(self, batch: str) -> PromptsOf:
        """Where pairs of a batch find what their states had shown; opened when first asked."""
        traces: list[Traces] = []

        def prompts(state_ids: Sequence[str]) -> Iterator[TraceState]:
            if not traces:
                traces.append(self._traces(batch))
            return traces[0].materialize(state_ids, self.settings.ingest.window)

        return prompts

    def _pairs(self, batches: Iterable[str]) -> Iterator[DPOPair]:
        """Pairs of batches with their prompts, one after the other."""
        for batch in batches:
            yield from pairs_of(self.root.read("dpo_pairs", batch), self._prompts(batch))

    @cached_property
    def _normalizer(self) -> DJNormalizer:
        """Loaded once for all batches: a recipe and its operators take a moment."""
        options = self.settings.normalize
        return DJNormalizer(
            options.recipe, executor=options.executor, ray_address=options.ray_address
        )

    @cached_property
    def _dedup_index(self) -> DedupIndex:
        """What each batch has kept."""
        return DedupIndex(
            self.root.path / "dedup" / self._normalizer.recipe.sha,
            batches=self.batches,
            start=self._normalizer.memories,
        )

    def _accounts(self) -> dict[str, Any]:
        """What everything that pays is told alike: the ledger, its ceilings, the price lists."""
        day_usd = self.settings.replay.max_daily_usd
        return {
            "ledger": self.settings.ledger_url(),
            "limits_usd": {} if day_usd is None else {"day": day_usd},
            "price_folder": self._price_folder(),
        }

    def _trainer_config(self) -> Path | None:
        config = self.settings.train.config
        if config is not None and not config.is_file():
            raise ConfigError(f"{config}: no such trainer config")
        return config

    def _dataset_copy(self) -> Path:
        """Where a dataset on an object store is worked on; not used for one that is a folder."""
        place = self.settings.dataset_dir()
        return place if is_local(place) else self.settings.local_dir() / "dataset"

    def _price_folder(self) -> Path | None:
        """Where price lists are kept; the sample's server has prices of its own each time."""
        return None if self.settings.replay.sample_teachers else self.root.path / "prices"

    def _pass(self, table: str, start: Callable[[], T], add: Callable[[T, pa.Table], T]) -> Pass[T]:
        """A pass over the batches that `table` holds."""

        def add_batch(value: T, key: str) -> T:
            return add(value, self.root.read(table, key)) if self.root.has(table, key) else value

        return Pass(self.batches, start=start, add=add_batch)

    def _write(self, name: str, batch: str, table: pa.Table | Iterable[pa.Table]) -> None:
        self.root.write(name, batch, table)
        passes = {
            "states": self._seen_states,
            "tools": self._seen_tools,
            "dpo_pairs": self._seen_pairs,
        }
        if name in passes:
            passes[name].forget(batch)

    def _batches_with(self, name: str) -> list[str]:
        batches = self.root.batches(name)
        if not batches:
            raise ConfigError(
                f"{self.root.path}: no {name} yet; run `replay-pipeline {WRITTEN_BY[name]}` first"
            )
        return batches

    def _tools_until(self, batch: str) -> pa.Table:
        """Tools seen in this batch or an earlier one: a small batch does not show them all."""
        rows = dict(self._seen_tools.before(batch))
        if self.root.has("tools", batch):
            rows = _with_tools(rows, self.root.read("tools", batch))
        return table_of(
            [
                {"name": name, "agent_version": version, "tool_json": definition}
                for (name, version, definition), times in rows.items()
                for _ in range(times)
            ],
            "tools",
        )

    def _state_digests(self, batch: str) -> list[str]:
        tools = (
            self._tools_until(batch)["tool_json"].to_pylist()
            if self.root.has("tools", batch)
            else []
        )
        return [*tools, *self._digests(batch, ("turns", "states"))]

    def _digests(self, batch: str, names: Sequence[str]) -> list[str]:
        return [f"{name}:{_digest(self.root.part(name, batch))}" for name in names]

    def _card_facts(self) -> CardFacts:
        """What the dataset card tells beyond the rows: teachers, and what each stage reported."""
        teachers: list[TeacherFacts] = [
            {"name": t.name, "model": t.model, "is_distillable": t.is_distillable}
            for t in self.settings.replay.teachers
        ]
        facts: CardFacts = {
            "teachers": teachers,
            "accepted_terms": self.settings.replay.accepted_terms,
            "ingest": self._reports("ingest"),
            "replay": self._reports("replay"),
            "pairs": self._reports("pairs"),
            "normalize": self._reports("normalize"),
        }
        if control_run := self.receipts.read("control", "all"):
            facts["control_run"] = control_run.report
        if self.settings.replay.sample_teachers:
            facts["notes"] = (
                "Made from the bundled sample: its sessions and answers were written for it, and "
                "the answers were not produced by the models they name."
            )
        return facts

    def _reports(self, stage: str) -> dict[str, dict[str, Any]]:
        """Reports of a stage by batch."""
        return {r.batch: r.report for r in self.receipts.all(stage=stage)}


def run(
    settings: Settings,
    *,
    with_training: bool = True,
    since: Mapping[tuple[str, str], object] | None = None,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Find new sessions and take every batch through all stages. Returns the summary.

    The budget is for the run as a whole: what one batch pays is not there for the next.

    Args:
        settings: everything the stages are told.
        with_training: whether to train on the dataset at the end.
        since: stamps of the receipts before the run began, if it has begun with something else.
        on_progress: called as long work moves on.

    Raises:
        ConfigError: a setting is wrong, or no session was found; nothing was paid.
    """
    pipeline = Pipeline(settings, on_progress=on_progress)
    since = pipeline.receipts.stamps() if since is None else since
    pipeline.check_settings()
    batches = pipeline.ingest_new()
    replay = pipeline.replay_within()
    for batch in batches:
        replay(batch)
        pipeline.pairs(batch)
        pipeline.normalize(batch)
    pipeline.publish()
    if with_training:
        pipeline.train()
    return pipeline.summary(since=since)


def _above_0(budget_usd: float) -> float:
    if budget_usd <= 0:
        raise ConfigError(
            f"the replay budget is {budget_usd} USD, which buys no answer: set a budget above "
            "0. Answers that are already paid for are kept in the ledger."
        )
    return budget_usd


def _with_ids(ids: set[str], states: pa.Table) -> set[str]:
    ids.update(states["state_id"].to_pylist())
    return ids


def _with_tools(known: dict[_ToolRow, int], tools: pa.Table) -> dict[_ToolRow, int]:
    """The definitions of a batch added to those that are known.

    A definition counts at most twice: merging it a second time may leave out what a schema says
    beyond its shape, a third time changes nothing.
    """
    for row in tools.select(["name", "agent_version", "tool_json"]).to_pylist():
        key = (row["name"], row["agent_version"], row["tool_json"])
        known[key] = min(2, known.get(key, 0) + 1)
    return known


def _hash(parts: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() if path.exists() else "-"


def _ignore(progress: Progress) -> None:
    del progress
