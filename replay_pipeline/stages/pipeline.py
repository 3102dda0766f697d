"""The whole pipeline as plain calls. Start reading here; Dagster and the CLI only schedule these.

Every stage reads tables, calls one library function, writes tables, and leaves a receipt: what it
was given (a fingerprint), what it did (its report) and how long it took. A stage whose fingerprint
has not changed hands back its receipt and does nothing, so any run may be repeated at no cost.
"""

import gc
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from replay_pipeline.errors import ConfigError, IngestError, ReplayPipelineError
from replay_pipeline.ingesters import (
    IngestResult,
    ingest,
    is_kept,
    is_there,
    keep,
    kept_files,
    read_manifest,
    restore,
    without_states,
)
from replay_pipeline.ingesters.fidelity import shares_by_client
from replay_pipeline.normalize import DJNormalizer, load_recipe
from replay_pipeline.pairs import (
    WITH_CONSENSUS,
    extract_pairs,
    on_policy_pairs,
    outcomes_table,
    pairs_table,
    positives_table,
)
from replay_pipeline.processes import python
from replay_pipeline.publish import (
    CardFacts,
    ExportReport,
    PublishReport,
    TeacherFacts,
    export,
    fetch,
    publish,
    retract,
    shards_of,
    to_be_published,
)
from replay_pipeline.publish.batch_facts import STAGE_FACTS, stage_facts
from replay_pipeline.publish.layout import CARD, MANIFESTS
from replay_pipeline.replay import (
    NOT_ASKED,
    Estimate,
    control,
    estimate,
    has_ledger,
    refuse_if_nobody_answers,
    replay_batch,
    replay_facts,
    replay_in_thread,
)
from replay_pipeline.replay.ledger import Ledger
from replay_pipeline.replay.rows import (
    teacher_actions_from_table,
    teacher_actions_table,
    token_logprobs_table,
)
from replay_pipeline.review import read_chances, read_marks, write_review
from replay_pipeline.settings import Settings, redaction_salt
from replay_pipeline.stages.audit.dataset import refuse_unfit_dataset
from replay_pipeline.stages.audit.tables import refuse_unfit
from replay_pipeline.stages.dedup_index import DedupIndex
from replay_pipeline.stages.doctor import require_trainer
from replay_pipeline.stages.integrity import is_copied, repair, verify
from replay_pipeline.stages.project import OnProgress, Owners, Project, digest_of, hash_of, named
from replay_pipeline.stages.read_ahead import ReadAhead
from replay_pipeline.stages.receipts import Receipt
from replay_pipeline.stages.redacting import redacted_again
from replay_pipeline.stages.staleness import changed_parts, find_outdated, refuse_outdated
from replay_pipeline.stages.summary import BATCH_STAGES, added
from replay_pipeline.stages.trainee import samplers, serving, without_addresses
from replay_pipeline.stages.trainer_process import (
    TRAINER_LOCK,
    Launch,
    TrainerJob,
    run_trainer,
    training_curves,
)
from replay_pipeline.stages.trials import judge_of, try_actions
from replay_pipeline.stages.workspaces import Workspaces
from replay_pipeline.storage.migrations import upgrade_tables
from replay_pipeline.storage.schemas import INGESTED, SCHEMA_VERSION
from replay_pipeline.storage.store import Place, copy_files, files_below
from replay_pipeline.storage.tables import DataRoot
from replay_pipeline.types import (
    ExportFormat,
    Progress,
    ReplayReport,
    TeacherAction,
    TraceState,
    Trial,
)

logger = logging.getLogger(__name__)

_POLL_S, _PLAYED_POLL_S = 30.0, 0.1
"""Seconds between two looks at a batch that was handed in."""


class Pipeline(Project):
    """The stages over one data root. They may be called in any order that has its inputs."""

    failed: Mapping[str, str] = {}
    """Why batches could not be ingested, by batch."""
    _is_upgrading = False
    """Whether receipts of older versions are taken over, and nothing is made anew."""
    _aside: DataRoot | None = None
    """Where stages write while something is made again that they have made before."""

    def ingest_new(self) -> list[str]:
        """Find new sessions and ingest every batch that is not. Returns all that are ingested.

        What went wrong with the others is in `failed`, by batch.

        Raises:
            ConfigError: there is no session at all.
            ReplayPipelineError: every batch has failed; the error is that of the last.
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
        done = {receipt.batch for receipt in self.receipts.figures(stage="ingest")}
        new = [each for each in manifests if each.key not in done]
        self._on_progress(
            Progress(
                stage="ingest", n_done=0, n_total=sum(each.n_bytes for each in new), unit="bytes"
            )
        )
        options = self.settings.ingest
        with ReadAhead(
            new,
            redact=options.is_redacted,
            hash_project=options.is_project_hashed,
            salt=redaction_salt(),
            n_processes=options.n_processes,
        ) as ahead:
            for batch in batches:
                try:
                    self.ingest(batch, ahead=ahead)
                except Exception as error:
                    # The next batch has other files; what is wrong with this one is told at the end.
                    is_ours = isinstance(error, ReplayPipelineError)
                    logger.error("%s: cannot be ingested: %s", batch, error, exc_info=not is_ours)
                    self.failed[batch] = str(error)
                    if len(self.failed) == len(batches):
                        raise
        return [batch for batch in batches if batch not in self.failed]

    def upgrade(self) -> dict[str, Any]:
        """Bring what an older version wrote to this one, without the logs and without paying.

        Tables get the columns of today, and their texts the secret rules of today. Receipts are
        taken over as they are: the settings of the root are taken for those it was made with.
        Returns what was done: tables by name, and receipts by stage.

        Raises:
            SchemaError: a table cannot be read, or is of a version that is not known.
            LedgerError: so is the ledger.
        """
        if has_ledger(self.settings.ledger_url()):
            Ledger(self.settings.ledger_url()).close()  # brings itself up to date as it opens
        tables = upgrade_tables(self.root)
        receipts: Counter[str] = Counter()
        self._is_upgrading = True
        try:
            for stage in BATCH_STAGES:
                for key in self.batches():
                    if self.receipts.read(stage, key) and not getattr(self, stage)(key).is_reused:
                        receipts[stage] += 1
        finally:
            self._is_upgrading = False
        return {"tables": tables, "receipts": dict(receipts)}

    def verify(self) -> dict[str, Any]:
        """Look at every byte that a receipt vouches for. Returns what is damaged, and what was seen.

        Raises:
            StorageError: the object store that holds the root cannot be reached.
        """
        return verify(self).to_json()

    def repair(self) -> dict[str, Any]:
        """Make again what `verify` finds damaged, and nothing else: nobody is asked, nothing is paid.

        Receipts and manifests are restored from their copies in the index, tables are made from the
        kept bytes of sessions and the ledger, and the dataset from the tables. What does not come
        out as its receipt says is left as it is. Returns what was repaired and what is left.

        Raises:
            StorageError: the object store that holds the root cannot be reached.
        """
        return repair(self)

    def make_aside(self, stage: str, batch: str, folder: Path) -> None:
        """Do what a stage did for a batch once more, into another folder; no receipt is written.

        Raises:
            ReplayPipelineError: it cannot be done, such as when the bytes of a session are gone.
        """
        self._aside = DataRoot(folder)
        try:
            if stage == "replay":
                self.replay(batch, max_total_usd=0.0)
            else:
                getattr(self, stage)(batch)
        finally:
            self._aside = None

    def keep_again(self, batch: str, name: str) -> None:
        """Keep bytes of a session again in place of a damaged copy, if its log is still there."""
        piece = self.place_of(name)
        folder = self._kept_folder()
        if folder is None or not isinstance(piece, Path):
            return
        damaged = piece.with_suffix(".damaged")
        if piece.exists():
            piece.replace(damaged)
        keep(read_manifest(batch, self.root.path), folder)
        if piece.exists():
            damaged.unlink(missing_ok=True)
        elif damaged.exists():
            damaged.replace(piece)

    def shards_again(
        self, manifest: Mapping[str, Any], facts: Mapping[str, Any], folder: Path
    ) -> Mapping[str, Path]:
        """Make the data files of a published batch again, below `folder`, by path in the dataset."""
        batch, options = manifest["trace_batch"], self.settings.publish
        return shards_of(
            manifest,
            self.root.read("normalized_pairs", batch),
            self._positives(batch),
            facts=facts,
            prompts=self._prompts(batch),
            lengths=options.lengths,
            tokenizer=options.tokenizer,
            logprobs=self.root.read("token_logprobs", batch) if self._is_scored(batch) else None,
            folder=folder,
        )

    def ingest(self, batch: str, *, ahead: ReadAhead | None = None) -> Receipt:
        """Read the sessions of a batch into `sessions`, `turns`, `states` and `tools`.

        A decision that an earlier batch had before it was complete moves here; of that batch only
        what depends on it is made again, and no answer is paid twice. A log that is gone is read
        from the bytes that were kept of it; if none were, it is counted, and the rest is read.

        Args:
            batch: which.
            ahead: where it may have been read already.
        """
        manifest = read_manifest(batch, self.root.path)
        options = self.settings.ingest
        given = [*self._chosen("ingest"), manifest.to_json()]
        folder = self._kept_folder()
        if folder is not None and self._aside is None:
            keep(manifest, folder)
        found = [
            (source, is_there(source, cursor.tail_sha))
            for source, cursor in zip(manifest.slices, manifest.cursors, strict=True)
        ]
        lost = [
            source
            for source, is_here in found
            if not (is_here or (folder is not None and is_kept(source, folder)))
        ]

        def work() -> dict[str, Any]:
            with TemporaryDirectory() as name:
                slices = [
                    source
                    if is_here or folder is None
                    else replace(source, copy=restore(source, folder, Path(name)))
                    for source, is_here in found
                    if source not in lost
                ]
                tell = self._tell_part(batch)
                # Read elsewhere, it could not know what other batches have.
                result = ahead.result(manifest) if ahead is not None else None
                if (
                    result is None
                    or slices != list(manifest.slices)
                    or any(map(self._owners.get, result.decided))
                ):
                    result = ingest(
                        slices,
                        redact=options.is_redacted,
                        hash_project=options.is_project_hashed,
                        known_state_ids=_Owned(self._owners, lambda owner: owner < batch),
                        superseded_state_ids=_Owned(self._owners, lambda owner: owner > batch),
                        salt=redaction_salt(),
                        on_progress=tell,
                    )
                else:
                    n_bytes = manifest.n_bytes
                    tell(Progress(stage="ingest", n_done=n_bytes, n_total=n_bytes, unit="bytes"))
            self._write_ingested(batch, self._with_earlier_conversations(batch, result).parts)
            if lost and self._aside is not None:
                raise IngestError(f"{lost[0].path}: gone, and its bytes were not kept")
            for source in lost:
                logger.warning("%s: gone, and its bytes were not kept: left out", source.path)
                result.report.skipped_files["gone"] += 1
            if self._aside is None:
                self._supersede(batch, result.state_ids)
            return result.report.to_json()

        def keep_tables(last: Receipt) -> dict[str, Any]:
            logger.info("%s: not read again; its tables are redacted as they are", batch)
            tables = {name: self.root.read(name, batch) for name in INGESTED}
            counts: Mapping[str, int] = {}
            if options.is_redacted:
                tables, counts = redacted_again(tables, salt=redaction_salt())
            self._write_ingested(batch, tables)
            redactions = added([last.report["redactions"], counts])
            return {**last.report, "redactions": redactions, "n_files_gone": len(lost)}

        def n_lost(report: Mapping[str, Any]) -> int:
            return report.get("skipped_files", {}).get("gone", 0)

        # What was read from logs that are gone now, new rules must reach in the tables. A log that
        # has come back is read.
        last = self.receipts.read("ingest", batch)
        is_less_than_before = last is not None and len(lost) > n_lost(last.report)

        def files() -> list[str]:
            kept = kept_files(manifest, folder) if folder is not None else []
            names = [f"sources/{path.relative_to(folder).as_posix()}" for path in kept if folder]
            return [f"batches/{batch}.json", *names]

        return self._stage(
            "ingest",
            batch,
            given,
            {},
            INGESTED,
            work,
            files=files,
            is_final=lambda report: n_lost(report) <= len(lost),
            instead=keep_tables if is_less_than_before or self._is_upgrading else None,
        )

    def _with_earlier_conversations(self, batch: str, result: IngestResult) -> IngestResult:
        """Return what was read with the names of the conversations of earlier batches that go on."""
        moved = self._moved_sessions.before(batch)
        names: dict[str, str] = {}
        for name, conversation in result.conversations.items():
            known = {moved[each] for each in conversation.named & moved.keys()}
            by_owner: dict[str, set[str]] = {}
            for state_id in conversation.copied:
                if owner := self._owners.get(state_id):
                    by_owner.setdefault(owner, set()).add(state_id)
            for owner, copied in by_owner.items():
                states = self.root.read("states", owner, columns=["state_id", "conversation"])
                rows = zip(*(column.to_pylist() for column in states.columns), strict=True)
                known |= {earlier for state_id, earlier in rows if state_id in copied}
            if known - {name}:
                names[name] = min(known)
            if len(known) > 1:
                logger.warning(
                    "%s: %s goes on with several conversations (%s) and counts as part of the first",
                    batch, name, ", ".join(sorted(known)),
                )  # fmt: skip
        return result.renamed(names)

    def _write_ingested(
        self, batch: str, tables: Mapping[str, pa.Table | Iterable[pa.Table]]
    ) -> None:
        for name, table in tables.items():
            self._write(name, batch, table)

    def _supersede(self, batch: str, state_ids: set[str]) -> None:
        """Take these states out of the earlier batches that had them."""
        owned: dict[str, set[str]] = {}
        for state_id in state_ids:
            if (owner := self._owners.get(state_id) or batch) != batch:
                owned.setdefault(owner, set()).add(state_id)
        for owner, taken in sorted(owned.items()):
            tables = {name: self.root.read(name, owner) for name in INGESTED}
            left = without_states(tables, taken)
            self._write_ingested(owner, left)
            logger.info("%s: %d states are complete in %s now", owner, len(taken), batch)
            if receipt := self.receipts.read("ingest", owner):
                self.receipts.write(
                    replace(
                        receipt,
                        report={
                            **receipt.report,
                            "n_sessions": left["sessions"].num_rows,
                            "n_turns": left["turns"].num_rows,
                            "n_states": left["states"].num_rows,
                            "outcomes": dict(
                                sorted(Counter(left["states"]["outcome"].to_pylist()).items())
                            ),
                            "fidelity": shares_by_client(left["sessions"], left["states"]),
                            "n_superseded": receipt.report.get("n_superseded", 0) + len(taken),
                        },
                        outputs=self._digests(owner, INGESTED),
                    )
                )
        self._owners.update(dict.fromkeys(state_ids, batch))

    def replay(
        self, batch: str, *, max_total_usd: float | None = None, night: str | None = None
    ) -> Receipt:
        """Ask teachers at the states of a batch, paying at most `max_total_usd` for new answers.

        A stage that stopped before every question was asked is not final: the next call goes on.
        Without `max_total_usd` the ceiling is the setting; 0 takes what is in the ledger. All calls
        for one `night`, of whatever run, cost at most `max_nightly_usd`.

        Raises:
            ConfigError: a teacher cannot be used.
        """
        replay = self.settings.replay
        given = [*self._chosen("replay"), *self._tool_definitions(batch)]

        def work() -> dict[str, Any]:
            with self._teachers([batch]) as teachers:
                report = replay_in_thread(
                    self._states([batch]),
                    teachers,
                    max_total_usd=replay.max_total_usd if max_total_usd is None else max_total_usd,
                    counts_recorded=False,
                    partition=batch,
                    tick=self._tell_part(batch),
                    ledger=self.settings.ledger_url(),
                    **self._options(night),
                )
            left = sum(n for why, n in report.skipped.items() if why in NOT_ASKED)
            n_total = len(report.actions) + sum(report.skipped.values())
            self._tell_part(batch)(
                Progress(
                    stage="replay", n_done=n_total - left, n_total=n_total,
                    cost_usd=report.newly_spent_usd,
                )
            )  # fmt: skip
            self._write("teacher_actions", batch, teacher_actions_table(report.actions))
            logprobs = token_logprobs_table(report.actions)
            if len(logprobs) or self.root.has("token_logprobs", batch):
                self._write("token_logprobs", batch, logprobs)
            refuse_if_nobody_answers(report)
            return replay_facts(report)

        return self._stage(
            "replay",
            batch,
            given,
            self._digests(batch, ("turns", "states")),
            ("teacher_actions",),
            work,
            files=lambda: [
                self.root.name_of(name, batch)
                for name in ("token_logprobs",)
                if self.root.has(name, batch)
            ],
            is_final=lambda report: report["is_complete"],
        )

    def hand_in(self, batches: Sequence[str]) -> ReplayReport:
        """Ask by batch API, at half the price and within a day, and wait for the answers.

        They are kept in the ledger; `replay` takes them from there. Stopped while it waits, it
        leaves what was handed in running, and the next call takes the answers over.

        Raises:
            ConfigError: a teacher has no batch API.
            TeacherError: an endpoint did not take a batch, or can't be reached.
        """
        replay = self.settings.replay
        with self._teachers(batches) as teachers:
            return replay_batch(
                self._states(batches),
                teachers,
                max_total_usd=replay.max_total_usd,
                counts_recorded=False,
                accepted_terms=replay.accepted_terms,
                poll_s=_PLAYED_POLL_S if self.settings.played else _POLL_S,
                ledger=self.settings.ledger_url(),
                **self._accounts(),
            )

    def replay_within(
        self, max_total_usd: float | None = None, *, night: str | None = None
    ) -> Callable[[str], Receipt]:
        """`replay` under one ceiling for all batches: what one pays is not there for the next.

        Calls with an unknown outcome count as paid. Without `max_total_usd` the ceiling is the
        setting: that of a `night`, which all its runs share, or that of a run.
        """
        options = self.settings.replay
        left_usd = options.max_nightly_usd if night else options.max_total_usd
        if max_total_usd is not None:
            left_usd = max_total_usd
        open_batches = set(self.root.batches("states")) - self.completed_batches()
        n_states = sum(self.root.n_rows("states", batch) for batch in open_batches)
        n_questions = n_states * len(self.settings.teachers())
        self._on_progress(
            Progress(stage="replay", n_done=0, n_total=n_questions, limit_usd=left_usd)
        )

        def replay(batch: str) -> Receipt:
            nonlocal left_usd
            receipt = self.replay(batch, max_total_usd=left_usd, night=night)
            if not receipt.is_reused:
                paid_usd = receipt.report["newly_spent_usd"] + receipt.report["unknown_usd"]
                left_usd = max(left_usd - paid_usd, 0.0)
            return receipt

        return replay

    def pairs(self, batch: str) -> Receipt:
        """Make `dpo_pairs`, `positives` and `outcomes` of what teachers would have done at a batch's states."""
        marks = self._marks()
        given = [*self._chosen("pairs"), *self._tool_definitions(batch)]

        def work() -> dict[str, Any]:
            answers = list(teacher_actions_from_table(self.root.read("teacher_actions", batch)))
            trials, tried = self._trials(batch, answers)
            report = extract_pairs(
                self._states([batch]),
                answers,
                self.settings.pairs.agreement_threshold,
                trials=trials,
                level=self.settings.pairs.level,
                include_natural=self.settings.pairs.include_natural,
                count_own_family=self.settings.pairs.count_own_family,
                min_p_better=self.settings.pairs.min_p_better,
                checked={pair_id: mark == "accept" for pair_id, mark in marks.items()},
                chances=self._chances(),
            )
            pairs = report.pairs
            self._write("dpo_pairs", batch, pairs_table(pairs))
            self._write("positives", batch, positives_table(report.positives))
            self._write("outcomes", batch, outcomes_table(report.outcomes))
            page = (self._aside or self.root).path / _review_page(batch)
            write_review(pairs, path=page, outcomes=report.outcomes, title=batch)
            return {
                **report.to_json(),
                **({"tried": tried} if tried else {}),
                "n_rejected_in_review": len(report.refuted),
                "n_consensus": sum(report.consensus_levels.values()),
                "n_agreement": report.outcome_counts.get("agreement", 0),
            }

        return self._stage(
            "pairs",
            batch,
            given,
            self._digests(batch, ("turns", "states", "teacher_actions")),
            ("dpo_pairs", "positives", "outcomes"),
            work,
            files=lambda: [_review_page(batch)],
            has_outputs=self.review_path(batch).exists,
        )

    def _trials(
        self, batch: str, answers: Sequence[TeacherAction]
    ) -> tuple[dict[str, dict[str, Trial]], dict[str, int]]:
        """Try the actions at a batch's states, as far as the settings allow, and count what was done."""
        options = self.settings.workspaces
        if options.execute == "off":
            return {}, {}
        manifest = read_manifest(batch, self.root.path)
        sources = [source.path for source in manifest.slices if source.path.is_file()]
        if not sources:
            logger.warning("%s: its logs are gone, so nothing of it is tried", batch)
            return {}, {"n_states": 0}
        judge = judge_of(options, kept=self.settings.local_dir() / "runs.sqlite")
        work = Workspaces(self.settings, sources=sources)
        return try_actions(work, judge, self._states([batch]), answers)

    def sample(self, batch: str) -> Receipt:
        """Sample the model to be trained where the teachers agree, and make pairs of it.

        What it does otherwise than they is the worse side of a pair in `sampled_pairs`, what it
        does like them a row of `sampled_positives`. Samples are kept in the ledger like answers
        that were paid for: a stage that stopped goes on, and other weights are sampled anew.

        Raises:
            ConfigError: no model to be trained is named, or it cannot be asked.
            TrainError: the model in the folder can't be served.
        """
        trainee = self.settings.trainee
        given = [*self._chosen("sample"), *self._tool_definitions(batch)]

        def work() -> dict[str, Any]:
            states = self._with_consensus(batch)
            pairs = self.settings.pairs
            is_asked = self._aside is None
            with serving(trainee) if is_asked else nullcontext(samplers(trainee)) as specs:
                replay = replay_in_thread(
                    states,
                    specs,
                    max_total_usd=trainee.max_total_usd if is_asked else 0.0,
                    counts_recorded=False,
                    partition=batch,
                    tick=self._tell_part(batch, stage="sample"),
                    ledger=self.settings.ledger_url(),
                    **self._accounts(),
                )
            refuse_if_nobody_answers(replay)
            report = on_policy_pairs(
                states,
                teacher_actions_from_table(self.root.read("teacher_actions", batch)),
                replay.actions,
                pairs.agreement_threshold,
                known_pairs=set(self.root.read("dpo_pairs", batch)["pair_id"].to_pylist()),
                known_positives=set(self.root.read("positives", batch)["state_id"].to_pylist()),
                level=pairs.level,
                count_own_family=pairs.count_own_family,
            )
            self._write("samples", batch, teacher_actions_table(replay.actions, "samples"))
            self._write("sampled_pairs", batch, pairs_table(report.pairs, "sampled_pairs"))
            self._write(
                "sampled_positives",
                batch,
                positives_table(report.positives, "sampled_positives"),
            )
            return {**replay_facts(replay), **report.to_json()}

        return self._stage(
            "sample",
            batch,
            given,
            self._digests(batch, ("turns", "states", "teacher_actions", "dpo_pairs", "outcomes")),
            ("samples", "sampled_pairs", "sampled_positives"),
            work,
            is_final=lambda report: report["is_complete"],
        )

    def estimate_samples(self, batches: Sequence[str]) -> Estimate:
        """Say what sampling the model to be trained would take beyond what is there already.

        Raises:
            ConfigError: no model to be trained is named.
        """
        states = [state for batch in batches for state in self._with_consensus(batch)]
        specs = samplers(self.settings.trainee)
        return estimate(states, specs, ledger=self.settings.ledger_url(), **self._accounts())

    def _with_consensus(self, batch: str) -> list[TraceState]:
        outcomes = self.root.read("outcomes", batch).to_pylist()
        wanted = {row["state_id"] for row in outcomes if row["outcome"] in WITH_CONSENSUS}
        return [state for state in self._states([batch]) if state["state_id"] in wanted]

    def normalize(self, batch: str) -> Receipt:
        """Send the pairs of a batch through data-juicer: into `normalized_pairs` or `dropped_pairs`."""
        normalizer = self._normalizer
        given = [
            normalizer.fingerprint,
            self._seen_pairs.before(batch),
            self.settings.ingest.window,
            *self._tool_definitions(batch),
        ]

        def work() -> dict[str, Any]:
            table = pa.concat_tables(
                [self.root.read(name, batch) for name in self._tables_of_pairs(batch)]
            )
            result = normalizer.run(
                table, prompts=self._prompts(batch), index=self._dedup_index().of(batch)
            )
            self._write("normalized_pairs", batch, result.kept)
            self._write("dropped_pairs", batch, result.dropped)
            return result.report.to_json()

        return self._stage(
            "normalize",
            batch,
            given,
            self._digests(batch, ("turns", "states", *self._tables_of_pairs(batch))),
            ("normalized_pairs", "dropped_pairs"),
            work,
            files=lambda: [f"dedup/{normalizer.recipe.sha}/{batch}.parquet"],
        )

    def publish(self) -> Receipt:
        """Publish all normalized pairs to one dataset folder, and to the Hub if a repository is set.

        Raises:
            ConfigError: there is nothing to publish yet.
            SecretFoundError: a secret is in the data; nothing was published.
            CheckFailedError: a batch breaks a contract, or was redacted by older rules; nothing was
                published.
        """
        # The pipelines of earlier steps refer to themselves, and hold what they knew of each batch.
        gc.collect()
        pa.default_memory_pool().release_unused()
        batches = self._batches_with("normalized_pairs")
        options = self.settings.publish
        place = self.settings.dataset_dir()
        facts: Mapping[str, Any] = self._card_facts()
        general = {key: value for key, value in facts.items() if key not in BATCH_STAGES}
        given = [*self._chosen("publish"), json.dumps(general, sort_keys=True, default=str)]
        self._outputs.clear()  # others may have written since
        inputs = {batch: self._published_from(batch, facts) for batch in batches}
        self._outputs.clear()
        last = self.receipts.read("publish", "all")
        is_known = (
            last is not None
            and place.exists()
            and last.report.get("made_under") == hash_of(given[:1])
            and not changed_parts(last, self._versions("publish"))
        )
        before = last.inputs if last and is_known else {}
        new = [batch for batch in batches if before.get(batch) != inputs[batch]]
        # Of thousands of batches, what is told and known of the others need not stay in memory.
        told: Any = general | {
            stage: {batch: facts[stage][batch] for batch in new if batch in facts[stage]}
            for stage in BATCH_STAGES
        }
        del facts

        checks: dict[str, str] = {}

        def look(folder: Place) -> None:
            checks.update(refuse_unfit_dataset(folder))

        def work() -> dict[str, Any]:
            wanted = set(new)
            mine = [each for each in self.receipts.written() if each.batch in wanted]
            refuse_outdated(find_outdated(mine, self._versions), new)
            refuse_unfit(self.root, new)
            with to_be_published(place, self._dataset_copy()) as folder:
                report = publish(
                    ((batch, self.root.read("normalized_pairs", batch)) for batch in new),
                    positives=((batch, self._positives(batch)) for batch in new),
                    prompts=self._prompts,
                    folder=folder,
                    repo_id=options.repo_id,
                    private=options.is_private,
                    test_fraction=options.test_fraction,
                    projects=self._projects if options.split_by == "project" else None,
                    look=look,
                    card_facts=told,
                    lengths=options.lengths,
                    tokenizer=options.tokenizer,
                    logprobs={
                        batch: self.root.read("token_logprobs", batch)
                        for batch in new
                        if self._is_scored(batch)
                    },
                )
                if not checks:  # it had nothing new
                    look(folder)
            return {**report.to_json(), "checks": checks, "made_under": hash_of(given[:1])}

        return self._stage(
            "publish",
            "all",
            given,
            inputs,
            (),
            work,
            files=self._dataset_files,
            has_outputs=place.exists,
        )

    def _projects(self, batch: str) -> dict[str, str]:
        """Return the project of each conversation of a batch: that of the session that began it."""
        columns = ["session_id", "conversation", "project"]
        rows = self.root.read("sessions", batch, columns=columns).to_pylist()
        rows.sort(key=lambda row: row["session_id"] == row["conversation"])
        return {row["conversation"]: row["project"] for row in rows if row["project"]}

    def _published_from(self, batch: str, facts: Mapping[str, Any]) -> str:
        """Digest what decides what is published of a batch, beside the settings."""
        tables = ["turns", "states", "normalized_pairs", "positives"]
        if self._is_sampled(batch):
            tables.append("sampled_positives")
        if self._is_scored(batch):
            tables.append("token_logprobs")
        return hash_of([
            *named(self._known_digests(batch, tables)),
            self.settings.ingest.window,
            self._tools_seen.before(batch),
            *named(self._known_digests(batch, ["tools"])),
            json.dumps(stage_facts(facts, batch), sort_keys=True, default=str),
        ])  # fmt: skip

    def _is_scored(self, batch: str) -> bool:
        """Whether the token probabilities of a batch are there, and to be published."""
        return self.settings.publish.teacher_logprobs and self.root.has("token_logprobs", batch)

    def _dataset_files(self) -> list[str]:
        """Name the files of the dataset that do not bear their digest in their name."""
        folder = self._dataset_copy()
        paths = [folder / CARD, *sorted((folder / MANIFESTS).glob("*.json"))]
        return [f"dataset/{p.relative_to(folder).as_posix()}" for p in paths if p.exists()]

    def export(self, form: ExportFormat, *, config: str | None = None) -> ExportReport:
        """Write the published pairs as files of another trainer, into a folder of this machine.

        Args:
            form: whose files.
            config: which pairs; by default those cut to the smallest length.

        Raises:
            ConfigError: there is no such format, or the dataset has no such pairs.
            SecretFoundError: a secret is in the rows; nothing was written.
            StorageError: the folder cannot be written; it is as before.
        """
        dataset = fetch(self.settings.dataset_dir(), self._dataset_copy())
        return export(dataset, self.settings.local_dir() / "exports" / form, form, config=config)

    def _positives(self, batch: str) -> pa.Table:
        has_samples = self.root.has("sampled_positives", batch)
        names = ("positives", "sampled_positives")[: 1 + has_samples]
        return pa.concat_tables([self.root.read(name, batch) for name in names])

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
            report = retract(
                folder=folder,
                session_ids=session_ids,
                batches=batches,
                repo_id=self.settings.publish.repo_id,
                erase=erase,
            )
        if published := self.receipts.read("publish", "all"):
            files = self._file_digests(self._dataset_files())
            self.receipts.amend(replace(published, files=files))
        return report

    def train(self, *, launch: Launch = run_trainer) -> Receipt:
        """Train a model on the published dataset, in a process of its own that `launch` runs.

        A training that was stopped or killed goes on from its last checkpoint.

        Raises:
            MissingDependencyError: the trainer's packages are not installed on this machine.
            TrainError: the trainer failed; the message ends with its last words.
        """
        if launch is run_trainer:
            require_trainer()
        config, given = self._trainer_config(), self._chosen("train")
        output, kept = self.settings.training_dir(), self.settings.model_dir()
        dataset = fetch(self.settings.dataset_dir(), self._dataset_copy())
        model = self.settings.train.model
        given += [f"{p.name}:{digest_of(p)}" for p in sorted(dataset.rglob("*.parquet"))]
        command = python("trainer", "--resume")
        command += ["--config", str(config)] if config else []
        command += ["--set", f"dataset={dataset}", "--set", f"output={output}"]
        command += ["--set", f"model={model}"] if model else []

        def work() -> dict[str, Any]:
            if not dataset.exists():
                place = self.settings.dataset_dir()
                raise ConfigError(f"{place}: no dataset yet; run `replay-pipeline publish` first")
            # The bundled run is for one core: more threads than free cores only wait for each other.
            job = TrainerJob(
                command=command,
                output=output,
                environment={} if config or model else {"OMP_NUM_THREADS": "1"},
                variables=self.settings.train.environment,
                stop_timeout_s=self.settings.train.stop_timeout_s,
            )
            launch(job, self._on_progress)
            report = json.loads((output / "report.json").read_text("utf-8"))
            if kept != output:
                copy_files(output, kept, [n for n in files_below(output) if n != TRAINER_LOCK])
            return {**report, "curves": training_curves(output / "metrics.jsonl")}

        return self._stage(
            "train",
            "all",
            given,
            {},
            (),
            work,
            files=lambda: [f"model/{n}" for n in files_below(kept) if n != TRAINER_LOCK],
            has_outputs=(kept / "report.json").exists,
        )

    def control(self, *, max_total_usd: float, n_states: int = 50) -> Receipt:
        """Ask the students' own models again: how often do they leave their recorded action?

        A sample of states is enough. The figure goes into the dataset card.

        Raises:
            ConfigError: the teachers are played, by a server that does not play the students.
        """
        if self.settings.played:
            raise ConfigError(
                f"the {self.settings.played} has no answers of its students: a control run needs "
                "real endpoints (REPLAY_TEACHERS=openrouter)"
            )
        started = time.perf_counter()
        report = control(
            self._states(self.batches()),
            max_total_usd=max_total_usd,
            n_states=n_states,
            level=self.settings.pairs.level,
            teacher=self.settings.replay.student,
            tick=self._on_progress,
            ledger=self.settings.ledger_url(),
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

    def code_version(self, stage: str) -> str:
        """Give one word for the code and the settings that decide what a stage writes.

        Raises:
            ConfigError: a file that the settings name cannot be read.
        """
        return hash_of([*named(self._versions(stage)), *self._chosen(stage)])

    def _chosen(self, stage: str) -> list[str]:
        """Give the settings that decide what a stage writes."""
        settings, pairs = self.settings, self.settings.pairs.model_dump_json(exclude={"marks"})
        window = settings.ingest.window
        match stage:
            case "ingest":
                return [f"{settings.ingest.is_redacted}", f"{settings.ingest.is_project_hashed}"]
            case "replay":
                teachers = settings.teachers()
                return [
                    *(t.model_dump_json(exclude={"base_url", "price"}) for t in teachers),
                    json.dumps([settings.replay.gates, window]),
                    *([pairs] if settings.replay.gates else []),
                    *([settings.played] if settings.played else []),
                ]
            case "pairs":
                checked = [self._marks(), self._chances()]
                tried = settings.workspaces.model_dump_json(exclude_defaults=True)
                return [
                    *(pairs, *(json.dumps(each, sort_keys=True) for each in checked), window),
                    *([tried] if settings.workspaces.execute != "off" else []),
                ]
            case "sample":
                trainee = settings.trainee
                asked = without_addresses(samplers(trainee))
                return [*asked, f"{trainee.max_prompt_tokens}", pairs, window]
            case "normalize":
                options = settings.normalize
                recipe = load_recipe(options.recipe, allow_operators=options.allow_operators)
                return [recipe.sha, window]
            case "publish":
                return [settings.publish.model_dump_json(), str(settings.dataset_dir())]
            case "train":
                config, model = self._trainer_config(), settings.train.model
                chosen = config.read_text("utf-8") if config else "tiny"
                return [chosen, *([model] if model else [])]
        return []

    def _marks(self) -> Mapping[str, Any]:
        return read_marks(self.settings.pairs.marks) if self.settings.pairs.marks else {}

    def _chances(self) -> Mapping[str, float]:
        return read_chances(self.settings.pairs.marks) if self.settings.pairs.marks else {}

    def check_settings(self) -> None:
        """Find what later stages would refuse, before the replay is paid for.

        Raises:
            ConfigError: a recipe, marks file or trainer config is wrong, or there is no folder for
                what must be on this machine.
        """
        self.settings.ledger_url()
        _ = self._normalizer
        self._marks()
        self._trainer_config()

    def _stage(
        self,
        stage: str,
        batch: str,
        given: Iterable[str],
        inputs: Mapping[str, str],
        outputs: Sequence[str],
        work: Callable[[], dict[str, Any]],
        *,
        files: Callable[[], list[str]] = list,
        is_final: Callable[[dict[str, Any]], bool] = lambda _: True,
        has_outputs: Callable[[], bool] = lambda: True,
        instead: Callable[[Receipt], dict[str, Any]] | None = None,
    ) -> Receipt:
        """Do `work` and write its receipt, unless the last receipt says that it is done.

        Args:
            stage: the name of the stage.
            batch: the batch, or `all`.
            given: everything but tables and code that decides what comes out.
            inputs: digests of the tables that are read.
            outputs: the tables that are written.
            work: does it; gives the report.
            files: names what the stage has read or written for good beside tables.
            is_final: whether a report says that nothing is left to do.
            has_outputs: whether what is no table is still there.
            instead: done in place of `work` where nothing but the code has changed.
        """
        fingerprint = hash_of([stage, SCHEMA_VERSION, *given, *named(inputs)])
        if self._aside is not None:
            report = work()
            return Receipt(
                stage=stage, batch=batch, fingerprint=fingerprint, report=report, seconds=0.0
            )
        versions = self._versions(stage)
        last = self.receipts.read(stage, batch)
        has_tables = has_outputs() and all(self.root.has(name, batch) for name in outputs)
        is_same = last is not None and last.fingerprint == fingerprint and has_tables
        if (
            last
            and is_same
            and not self._is_upgrading
            and is_final(last.report)
            and not changed_parts(last, versions)
        ):
            logger.info("%s %s: nothing has changed", stage, batch)
            return last
        started = time.perf_counter()
        if last and self._is_upgrading:
            if last.outputs or not has_tables:  # taken over before, or of today
                if last.digest:
                    return last
                amended = replace(last, files=self._file_digests(files()), is_reused=False)
                return self.receipts.amend(amended)
            report = instead(last) if instead else last.report
            # What was redacted is known to be so by the rules of today, and nothing else is known.
            versions = {part: versions[part] for part in ("secret rules",) if instead}
        else:
            report = instead(last) if last and is_same and instead else work()
        seconds = round(time.perf_counter() - started, 3)
        logger.info("%s %s: done in %.1f s", stage, batch, seconds)
        return self.receipts.write(
            Receipt(
                stage=stage,
                batch=batch,
                fingerprint=fingerprint,
                report=report,
                seconds=seconds,
                versions=versions,
                code_version=self.code_version(stage) if versions == self._versions(stage) else "",
                inputs=dict(inputs),
                outputs=self._digests(batch, outputs),
                files=self._file_digests(files()),
            )
        )

    def _file_digests(self, names: Sequence[str]) -> dict[str, str]:
        """Digest files by their names below the root; those that are small and alone are copied."""
        digests: dict[str, str] = {}
        copies: dict[str, list[tuple[str, bytes]]] = {}
        for name in names:
            place = self.place_of(name)
            if name.startswith("dataset/"):  # what was just written, and is not brought up yet
                place = self._dataset_copy() / name.removeprefix("dataset/")
            digests[name] = digest_of(place)
            if is_copied(name):
                folder, _, file = name.rpartition("/")
                copies.setdefault(folder, []).append((file, place.read_bytes()))
        for folder, files in copies.items():
            self.index.put(folder, files)
        return digests

    def _write(self, name: str, batch: str, table: pa.Table | Iterable[pa.Table]) -> None:
        if self._aside is not None:
            self._aside.write(name, batch, table)
        else:
            super()._write(name, batch, table)

    @cached_property
    def _normalizer(self) -> DJNormalizer:
        """Loaded once for all batches: a recipe and its operators take a moment."""
        options = self.settings.normalize
        return DJNormalizer(
            options.recipe,
            executor=options.executor,
            ray_address=options.ray_address,
            allow_operators=options.allow_operators,
        )

    def _dedup_index(self) -> DedupIndex:
        """What each batch has kept."""
        if self._aside is not None:
            return self._dedup(self._aside.path)
        return self._kept_keys

    @cached_property
    def _kept_keys(self) -> DedupIndex:
        return self._dedup(self.root.path)

    def _dedup(self, into: Place) -> DedupIndex:
        name = self._normalizer.recipe.sha
        return DedupIndex(
            self.root.path / "dedup" / name,
            batches=self.batches,
            start=self._normalizer.memories,
            into=into / "dedup" / name,
            kept=lambda encode, decode: self._kept_fold(
                f"dedup/{name}", "normalized_pairs", encode, decode
            ),
        )

    def _trainer_config(self) -> Path | None:
        config = self.settings.train.config
        if config is not None and not config.is_file():
            raise ConfigError(f"{config}: no such trainer config")
        return config

    def _dataset_copy(self) -> Path:
        """Tell where a dataset on an object store is worked on; not used for one that is a folder."""
        place = self.settings.dataset_dir()
        return place if isinstance(place, Path) else self.settings.local_dir() / "dataset"

    def _card_facts(self) -> CardFacts:
        """Tell what the dataset card tells beyond the rows: teachers, and what each stage reported."""
        teachers: list[TeacherFacts] = [
            {"name": t.name, "model": t.model, "is_distillable": t.is_distillable}
            for t in self.settings.teachers()
        ]
        facts: CardFacts = {
            "teachers": teachers,
            "accepted_terms": self.settings.replay.accepted_terms,
            "ingest": self.receipts.reports("ingest", names=STAGE_FACTS["ingest"]),
            "replay": self.receipts.reports("replay", names=STAGE_FACTS["replay"]),
            "pairs": self.receipts.reports("pairs", names=STAGE_FACTS["pairs"]),
            "normalize": self.receipts.reports("normalize", names=STAGE_FACTS["normalize"]),
        }
        if control_run := self.receipts.read("control", "all"):
            facts["control_run"] = control_run.report
        if self.settings.played == "sample":
            facts["notes"] = (
                "Made from the bundled sample: its sessions and answers were written for it, and "
                "the answers were not produced by the models they name."
            )
        return facts


def _review_page(batch: str) -> str:
    return f"review/{batch}.html"


class _Owned(Set[str]):
    """The states whose batch `is_wanted`, without a set of their own for each question."""

    def __init__(self, owners: Owners, is_wanted: Callable[[str], bool]) -> None:
        self._owners = owners
        self._is_wanted = is_wanted

    def __contains__(self, state_id: object) -> bool:
        owner = self._owners.get(state_id) if isinstance(state_id, str) else None
        return owner is not None and self._is_wanted(owner)

    def __iter__(self) -> Iterator[str]:
        raise TypeError("states are looked up by one, and not gone through")

    def __len__(self) -> int:
        raise TypeError("states are looked up by one, and not counted")


def run(
    settings: Settings,
    *,
    with_training: bool = True,
    since: Mapping[tuple[str, str], str] | None = None,
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
        MissingDependencyError: an extra that a stage needs is not installed; nothing was paid.
    """
    pipeline = Pipeline(settings, on_progress=on_progress)
    since = pipeline.receipts.stamps() if since is None else since
    pipeline.check_settings()
    if with_training:
        require_trainer()
    batches = pipeline.ingest_new()
    replay = pipeline.replay_within()
    for batch in batches:
        replay(batch)
        pipeline.pairs(batch)
        if settings.trainee.is_set:
            pipeline.sample(batch)
        pipeline.normalize(batch)
    pipeline.publish()
    if with_training:
        pipeline.train()
    return {**pipeline.summary(since=since), "failed_batches": dict(pipeline.failed)}
