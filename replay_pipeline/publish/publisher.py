"""Publish pairs as a dataset folder in the layout of the Hub, and on the Hub itself."""

import importlib
import io
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import xxhash

from replay_pipeline.errors import (
    ConfigError,
    MissingDependencyError,
    PublishError,
    SecretFoundError,
)
from replay_pipeline.publish import batch_facts, card, layout
from replay_pipeline.publish.answers import ScoredAnswers
from replay_pipeline.publish.blind import WARN_ABOVE, blind_control, in_words
from replay_pipeline.publish.cuts import cut_pairs, with_needs
from replay_pipeline.publish.folder import alone, list_files, read_files, replace_files
from replay_pipeline.publish.lengths import TokenSizes
from replay_pipeline.publish.loading import problems_of_loading
from replay_pipeline.publish.play import n_rehearsed, refuse_rehearsal
from replay_pipeline.publish.splits import SPLITS, ConversationSplit, Split, sha_of, sides_in
from replay_pipeline.redaction.redactor import SecretHit, find_secrets_in
from replay_pipeline.storage.pair_rows import PromptsOf, table_with_prompts, with_prompts
from replay_pipeline.storage.schemas import NORMALIZED_PAIRS, POSITIVES
from replay_pipeline.types import PAIR_LENGTHS, TEST_FRACTION, NormalizedDPOPair

logger = logging.getLogger(__name__)

pc: Any = pyarrow.compute  # makes its functions at import, unknown to type checkers
_SCANNED_AT_ONCE, _MAX_CHARS_AT_ONCE = 2_000, 8_000_000

_ENOUGH_SIDES = 2_000
"""Pairs of which the prompt-blind control takes those that it looks at."""

MAX_SHARD_BYTES = 256_000_000
"""Arrow bytes of one shard, before compression."""


@dataclass(frozen=True, kw_only=True)
class PublishReport:
    """What one publication did."""

    dataset: str
    """The folder."""
    repo_id: str | None = None
    rows_by_split: dict[str, dict[str, int]] = field(default_factory=dict)
    """Rows of the whole dataset by config and split."""
    batches: list[str] = field(default_factory=list)
    """Batches that this publication brought."""
    files_written: list[str] = field(default_factory=list)
    files_unchanged: list[str] = field(default_factory=list)
    files_removed: list[str] = field(default_factory=list)
    commits: list[str] = field(default_factory=list)
    """Ids of the commits that were made on the Hub, oldest first; empty: it had all of it."""
    blind: dict[str, Any] | None = None
    """How often the chosen side is told without the prompt, as `BlindControl` has it."""
    answers_left_out: dict[str, int] = field(default_factory=dict)
    """Answers of a consensus without a row in `teacher_logprobs`, by reason, where it was asked for."""
    tag: str | None = None
    """Name of this content: equal content has an equal tag."""

    def to_json(self) -> dict[str, Any]:
        """Give the report as plain values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class HubOptions:
    """How the Hub is reached."""

    repo_id: str | None = None
    private: bool = True
    token: str | None = None
    endpoint: str | None = None
    patience_s: float = 300.0

    def open(self) -> Any:
        """Give the repository, which need not exist yet; `None` without a `repo_id`."""
        if self.repo_id is None:
            return None
        return _hub_room().hub.HubDataset(
            self.repo_id, token=self.token, endpoint=self.endpoint, patience_s=self.patience_s
        )


def publish(
    batches: Iterable[tuple[str, pa.Table]] | Iterable[NormalizedDPOPair],
    *,
    folder: Path | str,
    repo_id: str | None = None,
    positives: Iterable[tuple[str, pa.Table]] = (),
    prompts: Callable[[str], PromptsOf] | None = None,
    private: bool = True,
    test_fraction: float = TEST_FRACTION,
    projects: Callable[[str], Mapping[str, str]] | None = None,
    messages: Callable[[str], Mapping[str, Collection[str]]] | None = None,
    look: Callable[[Path], object] | None = None,
    card_facts: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    lengths: Sequence[int] = PAIR_LENGTHS,
    tokenizer: Path | None = None,
    logprobs: Mapping[str, pa.Table] | None = None,
    token: str | None = None,
    endpoint: str | None = None,
    patience_s: float = 300.0,
) -> PublishReport:
    """Bring batches into the dataset: new ones are added, known ones replaced, others stay.

    The folder goes from its old version to the new one at once, and so does the Hub. Publishing
    the same rows again changes nothing.

    Args:
        batches: batch key and table `normalized_pairs`; or the pairs themselves, which become the
            batch `pairs` and replace what it held before.
        folder: the dataset folder; made when it is missing.
        repo_id: Hub dataset `owner/name` to bring to the same content.
        positives: batch key and table `positives` of the same or other batches.
        prompts: where the states of a batch are, by its key; not needed for tables that hold the
            columns of `PROMPT` themselves.
        private: visibility of a repository that is created.
        test_fraction: share of conversations, by hash, in the test split. Those that were published
            before keep their side, whatever the fraction was.
        projects: the project of each conversation of a batch, by its key, where those of one
            project are to come to one side.
        messages: hashes of the long messages of each conversation of a batch, by its key: two or three
            that share one come to one side, and what more share is common.
        look: called with the folder of the new version before it takes the place of the old one;
            what it raises keeps the old one.
        card_facts: what the card should say beyond what the rows say, as in `CardFacts`.
        max_shard_bytes: size at which a batch is written as several files.
        lengths: tokens to which prompts are cut in configs of their own, such as `pairs_8k`.
        tokenizer: what counts the tokens, as in `TokenSizes`.
        logprobs: tables `token_logprobs` by batch key: of their answers a config `teacher_logprobs`
            is made; `None` makes none.
        token: token for the Hub; by default `HF_TOKEN`, or what `hf auth login` has stored.
        endpoint: address of the Hub, where it is not the public one.
        patience_s: how long faults of the Hub are waited out, in seconds.

    Raises:
        ConfigError: a batch key cannot be a folder name or comes twice, the repository name is
            none, or there is no such tokenizer.
        SchemaError: there is nowhere to take the prompts from, or a pair was not normalized.
        SecretFoundError: a secret is in the rows or in the card; nothing was published.
        StorageError: the folder cannot be written; it is as before.
        PublishError: a state is gone from its batch, and nothing was published; or the Hub
            refused, and the folder has the new version, the Hub the old one.
        MissingDependencyError: the Hub is asked for, but its client is not installed.
    """
    folder = Path(folder)
    given, agreed = _by_key(_as_batches(batches)), _by_key(positives)
    sizes = TokenSizes(tokenizer)
    options = HubOptions(
        repo_id=repo_id, private=private, token=token, endpoint=endpoint, patience_s=patience_s
    )
    hub = options.open()
    with TemporaryDirectory(prefix="publish-") as aside, alone(folder):
        before = read_manifests(folder)
        every, facts = _state_of(folder, before, hub)
        facts = batch_facts.merge_facts(facts, batch_facts.general_facts(card_facts or {}))
        gone = batch_facts.Retracted.of(facts)
        keys = {*given, *agreed} - gone.batches
        given = {key: gone.without(given.get(key, NORMALIZED_PAIRS.empty_table())) for key in keys}
        agreed = {key: gone.without(agreed.get(key, POSITIVES.empty_table())) for key in keys}
        there = {key: manifest for key, manifest in every.items() if key not in keys}
        belong, named = _conversations_of(keys, given, agreed, projects)
        said = _messages_of(keys, belong, messages)
        sides, moved = _earlier_sides(folder, hub, list(every.values()), facts, named)
        split = ConversationSplit.over(
            belong,
            test_fraction=test_fraction,
            sides=sides,
            ties=_shared(said, batch_facts.n_with_message(there.values())),
        )
        old = {key: m for key, m in there.items() if m.get("layout") != layout.VERSION}
        version = _Version(Path(aside), facts=facts, owned=keys | old.keys(), before=before)

        def add(
            key: str, pairs: Iterable[pa.Table], agreed: Iterable[pa.Table], **facts: Any
        ) -> None:
            _add(version, key, pairs, agreed, lengths, sizes, max_shard_bytes, **facts)

        scored = {key: ScoredAnswers.of(table) for key, table in (logprobs or {}).items()}

        for key in sorted(keys):
            states = prompts(key) if prompts else None
            add(
                key,
                *_rows_of(key, given[key], agreed[key], states),
                split=split,
                ties={name: [project, *said.get(name, ())] for name, project in belong.items()},
                stages=batch_facts.stage_facts(card_facts or {}, key),
                scored=scored.get(key),
            )
        for key, manifest in sorted(old.items()):  # one dataset has one form of columns
            pairs, positive = (
                map(gone.without, _published_rows(folder, hub, manifest, config, named))
                for config in ("pairs", "positives")
            )
            add(key, pairs, positive, split=split, ties={}, stages=manifest["stages"])
        version.know(batch_facts.side_facts(split.sides, moved, [*there.values(), *version.new]))
        version.measure(folder)
        report = version.write(folder, options, look)
        left_out = sum((each.left_out for each in scored.values()), Counter())
        report = replace(report, answers_left_out=dict(sorted(left_out.items())))
        return version.bring(folder, hub, options, report)


def shards_of(
    manifest: Mapping[str, Any],
    pairs: pa.Table,
    positives: pa.Table,
    *,
    facts: Mapping[str, Any],
    folder: Path,
    prompts: PromptsOf | None = None,
    lengths: Sequence[int] = PAIR_LENGTHS,
    tokenizer: Path | None = None,
    logprobs: pa.Table | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> dict[str, Path]:
    """Make the data files of a published batch again, of the same tables, with the splits it has.

    Args:
        manifest: what was published of the batch.
        pairs: its table `normalized_pairs`.
        positives: its table `positives`.
        facts: facts of the dataset, which say what was retracted.
        folder: where the files are made.
        prompts: where the states of the batch are.
        lengths: as in `publish`.
        tokenizer: as in `publish`.
        logprobs: its table `token_logprobs`, if that was published.
        max_shard_bytes: as in `publish`.

    Returns:
        The files by their path in the dataset.
    """
    key, gone = manifest["trace_batch"], batch_facts.Retracted.of(facts)
    version = _Version(folder, facts=facts, owned={key}, before={})
    rows = _rows_of(key, gone.without(pairs), gone.without(positives), prompts)
    _add(
        version,
        key,
        *rows,
        lengths,
        TokenSizes(tokenizer),
        max_shard_bytes,
        split=ConversationSplit(
            manifest["test_fraction"], sides_in(manifest.get("conversations", {}))
        ),
        ties={},
        stages=manifest["stages"],
        scored=None if logprobs is None else ScoredAnswers.of(logprobs),
    )
    return version.shards()


def retract(
    *,
    folder: Path,
    session_ids: Iterable[str] = (),
    batches: Iterable[str] = (),
    repo_id: str | None = None,
    erase: bool = False,
    token: str | None = None,
    endpoint: str | None = None,
    patience_s: float = 300.0,
) -> PublishReport:
    """Take sessions or batches out of the dataset, for good: later publications leave them out.

    Args:
        folder: the dataset folder.
        session_ids: sessions, of any batch.
        batches: whole batches.
        repo_id: Hub dataset to take them out of as well.
        erase: also forget the history of the Hub dataset and delete its old files there. Tags and
            revisions that somebody pinned are gone then.
        token: token for the Hub.
        endpoint: address of the Hub, where it is not the public one.
        patience_s: how long faults of the Hub are waited out, in seconds.

    Raises:
        StorageError: the folder cannot be written; it is as before.
        PublishError: the Hub refused; the folder has the new version, the Hub the old one.
    """
    options = HubOptions(repo_id=repo_id, token=token, endpoint=endpoint, patience_s=patience_s)
    hub = options.open()
    with TemporaryDirectory(prefix="publish-") as aside, alone(folder):
        before = read_manifests(folder)
        there, facts = _state_of(folder, before, hub)
        new = batch_facts.Retracted(frozenset(map(sha_of, session_ids)), frozenset(batches))
        touched = {
            key
            for key, manifest in there.items()
            if key in new.batches
            or new.sessions & set(batch_facts.sessions_of(manifest))
            or manifest.get("layout") != layout.VERSION
        }
        merged = batch_facts.merge_facts(facts, new.facts())
        sides, moved = _earlier_sides(folder, hub, list(there.values()), facts, {})
        fractions = [manifest["test_fraction"] for manifest in there.values()]
        split = ConversationSplit(max(fractions, default=TEST_FRACTION), sides)
        version = _Version(Path(aside), facts=merged, owned=touched, before=before)
        for key in sorted(touched - new.batches):
            manifest = there[key]
            more = [name for name in manifest["files"] if name not in layout.CONFIGS]
            configs = ["positives", "pairs", *more]
            parts = (
                (config, new.without(part))
                for config in configs
                for part in _published_rows(folder, hub, manifest, config, {})
            )
            tokens = manifest.get("tokens", {})
            version.add(
                key,
                parts,
                split,
                {},
                stages=manifest["stages"],
                counted=tokens.get("counted"),
                not_cut=tokens.get("not_cut"),
            )
        stay = [manifest for key, manifest in there.items() if key not in touched]
        version.know(batch_facts.side_facts(sides, moved, [*stay, *version.new]))
        report = version.write(folder, options)
        report = version.bring(folder, hub, options, report)
    if erase and hub is not None:
        hub.erase(lambda path: layout.batch_of(path) is not None)
    return report


def problems_on_hub(
    repo_id: str,
    *,
    token: str | None = None,
    endpoint: str | None = None,
    patience_s: float = 300.0,
) -> list[str]:
    """Load what the Hub holds of a dataset, as `problems_of_loading` does, and return what is wrong.

    Of each config and split the first and the last shard are fetched, with the card that declares
    them.

    Args:
        repo_id: the dataset.
        token: token for the Hub.
        endpoint: address of the Hub, where it is not the public one.
        patience_s: how long faults of the Hub are waited out, in seconds.

    Raises:
        PublishError: it cannot be read.
    """
    options = HubOptions(repo_id=repo_id, token=token, endpoint=endpoint, patience_s=patience_s)
    hub = options.open()
    head = hub.head()
    shards: dict[tuple[str, str], list[str]] = {}
    for path in sorted(head.files):
        if path.startswith(f"{layout.DATA}/") and layout.batch_of(path):
            _, config, split, *_ = path.split("/")
            shards.setdefault((config, split), []).append(path)
    rows: dict[str, dict[str, int]] = {}
    with TemporaryDirectory(prefix="hub-") as name:
        folder = Path(name)
        (folder / layout.CARD).write_bytes(hub.read(layout.CARD, revision=head.sha))
        for (config, split), paths in shards.items():
            n_rows = 0
            for path in {paths[0], paths[-1]}:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(hub.read(path, revision=head.sha))
                n_rows += pq.read_metadata(folder / path).num_rows
            rows.setdefault(config, {})[split] = n_rows
        found = problems_of_loading(folder, rows)
    return found[0] if found else []


class _Version:
    """The next version of the dataset: new content of the batches that it owns.

    Its files are written to a folder of their own first, so that prompts pass through in parts.
    `before` are the manifests of the dataset as it is.
    """

    def __init__(
        self,
        aside: Path,
        *,
        facts: Mapping[str, Any],
        owned: set[str],
        before: Mapping[str, dict[str, Any]],
    ) -> None:
        self._aside = aside
        self._stay = {key: manifest for key, manifest in before.items() if key not in owned}
        self._facts, self._owned = dict(facts), owned
        self._files: dict[str, bytes | Path] = {}
        self._manifests: dict[str, dict[str, Any]] = {}

    def add(
        self,
        key: str,
        parts: Iterable[tuple[str, pa.Table]],
        split: ConversationSplit,
        ties: Mapping[str, Iterable[str | None]],
        *,
        stages: Mapping[str, Any],
        counted: str | None,
        not_cut: Mapping[str, Mapping[str, int]] | None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        scored: ScoredAnswers | None = None,
    ) -> None:
        """Make the files and the manifest of a batch, from rows by config.

        Args:
            key: the batch.
            parts: rows of `pairs`, `positives` and the configs that are cut.
            split: who is in which split.
            ties: what each conversation shares with those that are to be on its side.
            stages: what the stages reported about the batch.
            counted: how tokens were counted, in words.
            not_cut: pairs too long for a config that is cut, by reason.
            max_shard_bytes: size at which a config is written as several files.
            scored: the teachers' answers, where their token probabilities are published too.

        Raises:
            SecretFoundError: there is a secret in the rows.
        """
        shards: dict[tuple[str, Split], layout.Shards] = {}
        scan, summed = SecretScan(key), batch_facts.Summed()
        sessions: dict[str, set[str]] = {side: set() for side in SPLITS}
        talks: dict[str, set[str]] = {side: set() for side in SPLITS}

        n_play = 0

        def put(config: str, rows: pa.Table) -> None:
            nonlocal n_play
            n_play += n_rehearsed(rows) if config in ("pairs", "positives") else 0
            sides = [split.of(each) for each in layout.conversations_in(rows, {})]
            for side in SPLITS:
                part = rows.filter(pa.array([s == side for s in sides], pa.bool_()))
                if (config, side) not in shards:
                    shards[config, side] = layout.Shards(
                        self._aside / key / config / side,
                        layout.schema_of(config),
                        max_shard_bytes=max_shard_bytes,
                    )
                shards[config, side].add(part)
                sessions[side].update(_sessions(part))
                talks[side].update(layout.conversations_in(part, {}))

        n_positives = 0
        for config, part in parts:
            scan.take(part, config)
            put(config, part)
            for name, rows in _derived(config, part):
                put(name, rows)
            if scored is not None and config in ("pairs", "positives"):
                answers = scored.rows(part)
                scan.take(answers, "teacher_logprobs")
                put("teacher_logprobs", answers)
            if config == "pairs":
                summed.add(part)
            if config == "positives":
                n_positives += len(part)
            elif config not in layout.ON_REQUEST:
                summed.measure(config, part)
        scan.finish()
        counts: dict[str, dict[str, dict[str, int]]] = {}
        for (config, side), shard in shards.items():
            shard.close()
            for name, path in shard.files.items():
                self._files[f"{layout.batch_dir(config, side, key)}/{name}"] = path
                counts.setdefault(config, {}).setdefault(side, {})[name] = shard.n_rows[name]
        shared = {
            side: [name for each in found for name in ties.get(each, ())]
            for side, found in talks.items()
        }
        self._manifests[key] = batch_facts.manifest_of(
            key,
            files=counts,
            pairs=summed,
            n_positives=n_positives,
            sessions=_shas(sessions),
            conversations=_shas(talks),
            ties=_shas(shared),
            test_fraction=split.test_fraction,
            stages=stages,
            counted=counted,
            not_cut=not_cut,
        )
        self._manifests[key] |= {"n_rehearsed": n_play} if n_play else {}
        self._files[layout.manifest_path(key)] = batch_facts.encode(self._manifests[key])

    @property
    def new(self) -> list[dict[str, Any]]:
        """The manifests of the batches that it owns."""
        return list(self._manifests.values())

    def know(self, facts: Mapping[str, Any]) -> None:
        """Take in facts of the dataset."""
        self._facts = batch_facts.merge_facts(self._facts, facts)

    def shards(self) -> dict[str, Path]:
        """Give the data files, by their path in the dataset."""
        return {name: data for name, data in self._files.items() if isinstance(data, Path)}

    def measure(self, folder: Path) -> None:
        """Measure how much of the preferences shows without the prompt; the facts keep it.

        Of many batches some are looked at, by the hash of their keys. Batches that stay count as
        far as their files are in the folder.
        """
        sides: list[tuple[str, str, str]] = []
        for key, manifest in sorted(
            (self._stay | self._manifests).items(), key=lambda one: _sha(one[0])
        ):
            if len(sides) >= _ENOUGH_SIDES:
                break
            for side in SPLITS:
                for name in manifest["files"].get("pairs", {}).get(side, {}):
                    path = f"{layout.batch_dir('pairs', side, key)}/{name}"
                    file = self._files.get(path, folder / path)
                    if isinstance(file, Path) and file.exists():
                        with pq.ParquetFile(file) as shard:
                            sides += _sides(shard.read(columns=_SIDES))
        chosen, rejected, sessions = zip(*sides, strict=True) if sides else ((), (), ())
        if (found := blind_control(chosen, rejected, sessions)) is None:
            self._facts.pop("blind_control", None)
            return
        self._facts["blind_control"] = found.to_json()
        if found.ngrams > WARN_ABOVE:
            logger.warning("%s", in_words(found.to_json()))

    def write(
        self, folder: Path, options: HubOptions, look: Callable[[Path], object] | None = None
    ) -> PublishReport:
        """Bring the folder to this version, if nothing is found at a look at it."""
        here = {**self._stay, **self._manifests}
        refuse_rehearsal(here, options.repo_id)
        shared = {
            layout.FACTS: batch_facts.encode(self._facts),
            layout.CARD: card.render(here, self._facts),
        }
        for path, data in shared.items():
            _refuse_secrets([data.decode()], [path])
        stale = {path for path in list_files(folder) if layout.batch_of(path) in self._owned}
        change = replace_files(folder, {**self._files, **shared}, stale - self._files.keys(), look)
        return PublishReport(
            dataset=str(folder),
            repo_id=options.repo_id,
            rows_by_split=batch_facts.rows_by_split(here),
            batches=sorted(self._manifests),
            files_written=change.written,
            files_unchanged=change.unchanged,
            files_removed=change.removed,
            blind=self._facts.get("blind_control"),
            tag=f"data-{batch_facts.digest_of(here)}",
        )

    def bring(
        self, folder: Path, hub: Any, options: HubOptions, report: PublishReport
    ) -> PublishReport:
        """Bring the Hub, if it is asked for, to this version."""
        if hub is None:
            return report
        hub.ensure(private=options.private)
        room = _hub_room().sync
        contribution = room.Publication(
            batches=frozenset(self._owned),
            files=self._files,
            manifests=self._manifests,
            facts=self._facts,
            known=read_files(folder, layout.MANIFESTS),
        )
        done = room.Sync(hub, contribution).run()
        logger.info("%s: %d commits, tag %s", options.repo_id, len(done.commits), done.tag)
        rows = batch_facts.rows_by_split(done.manifests)
        return replace(report, rows_by_split=rows, commits=done.commits, tag=done.tag)


def _hub_room() -> Any:
    """Give the modules that need the Hub's client, which a folder does not need."""
    try:
        importlib.import_module("replay_pipeline.publish.sync")
    except ImportError as error:
        raise MissingDependencyError(
            f"the Hub's client is missing ({error}): pip install 'replay-pipeline[publish]'"
        ) from error
    return importlib.import_module("replay_pipeline.publish")


def _state_of(
    folder: Path, before: Mapping[str, dict[str, Any]], hub: Any
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Manifests of all batches, and the facts, of folder and Hub together."""
    manifests = dict(before)
    path = folder / layout.FACTS
    facts = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if hub is not None and hub.exists():
        room = _hub_room().sync
        head = hub.head()
        known = room.Publication(
            batches=frozenset(),
            files={},
            manifests={},
            facts={},
            known=read_files(folder, layout.MANIFESTS),
        )
        manifests = {**room.remote_manifests(hub, head, known, {}), **manifests}
        facts = batch_facts.merge_facts(room.remote_facts(hub, head), facts)
    return manifests, facts


def _published_rows(
    folder: Path, hub: Any, manifest: Mapping[str, Any], config: str, named: Mapping[str, str]
) -> Iterator[pa.Table]:
    """Give the rows of a batch in a config, from the folder, or from the Hub if it is not there."""
    for side in SPLITS:
        for file in _shards(folder, hub, manifest, config, side):
            for rows in layout.read_shard(file, config):
                place = rows.column_names.index("conversation")
                told = pa.array([
                    named.get(session or "", conversation)
                    for session, conversation in zip(
                        rows["session_id"].to_pylist(),
                        rows["conversation"].to_pylist(),
                        strict=True,
                    )
                ], pa.string())  # fmt: skip
                yield rows.set_column(place, rows.field(place), told)


def _shards(
    folder: Path, hub: Any, manifest: Mapping[str, Any], config: str, side: str
) -> Iterator[Path | bytes]:
    batch, version = manifest["trace_batch"], manifest.get("layout", 1)
    for name in manifest["files"].get(config, {}).get(side, {}):
        path = f"{layout.batch_dir(config, side, batch, version=version)}/{name}"
        local = folder / path
        yield local if local.exists() else hub.read(path, revision="main")


def _earlier_sides(
    folder: Path,
    hub: Any,
    manifests: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Any],
    named: Mapping[str, str],
) -> tuple[dict[str, Split], set[str]]:
    """Return the side of all that was published, by hash, and the conversations that were cut.

    An older version split each session by itself, so a conversation could have rows on both sides.
    It goes to train as a whole: what was ever in train is never in test.
    """
    sides = batch_facts.known_sides(manifests, facts)
    cut: set[str] = set()
    for manifest in manifests:
        if "conversations" in manifest:
            continue
        for config, side in product(("pairs", "positives"), SPLITS):
            for file in _shards(folder, hub, manifest, config, side):
                rows = pq.read_table(
                    io.BytesIO(file) if isinstance(file, bytes) else file,
                    columns=["session_id", "state_id"],
                    partitioning=None,
                )
                for sha in {sha_of(name) for name in layout.conversations_in(rows, named)}:
                    if sides.setdefault(sha, side) != side:
                        sides[sha] = "train"
                        cut.add(sha)
    return sides, cut


def _conversations_of(
    keys: Iterable[str],
    given: Mapping[str, pa.Table],
    agreed: Mapping[str, pa.Table],
    projects: Callable[[str], Mapping[str, str]] | None,
) -> tuple[dict[str, str | None], dict[str, str]]:
    """Return the conversations of tables with their projects, and the conversation of each session."""
    belong: dict[str, str | None] = {}
    named: dict[str, str] = {}
    for key in sorted(keys):
        project_of = projects(key) if projects else {}
        for table in (given[key], agreed[key]):
            conversations = layout.conversations_in(table, {})
            belong |= {each: project_of.get(each) for each in conversations}
            named |= dict(zip(_sessions(table), conversations, strict=True))
    return belong, named


MAX_SHARING = 3
"""Conversations that share a message: what more of them share comes from a program."""


def _messages_of(
    keys: Iterable[str],
    belong: Collection[str],
    messages: Callable[[str], Mapping[str, Collection[str]]] | None,
) -> dict[str, set[str]]:
    """Return the long messages of the conversations at hand."""
    said: dict[str, set[str]] = {}
    for key in sorted(keys) if messages else ():
        for name, hashes in messages(key).items() if messages else ():
            if name in belong:
                said.setdefault(name, set()).update(hashes)
    return said


def _shared(
    said: Mapping[str, Iterable[str]], n_published: Mapping[str, int]
) -> Iterator[list[str]]:
    """Yield conversations that share a message, with the message; what is common is left out."""
    having: dict[str, list[str]] = {}
    for name, hashes in said.items():
        for each in sorted(hashes):
            having.setdefault(each, []).append(name)
    for each, names in having.items():
        n_elsewhere = n_published.get(sha_of(each), 0)
        if 1 < len(names) + n_elsewhere <= MAX_SHARING:
            yield [*names, each]


def _rows_of(
    key: str, pairs: pa.Table, positives: pa.Table, states: PromptsOf | None
) -> tuple[Iterator[pa.Table], Iterator[pa.Table]]:
    """Give the rows of a batch as configs have them, in parts."""
    return (
        (layout.pair_rows(part, key) for part in _in_full(pairs, states, key)),
        (layout.positive_rows(part, key) for part in _in_full(positives, states, key)),
    )


def _add(
    version: _Version,
    key: str,
    pairs: Iterable[pa.Table],
    agreed: Iterable[pa.Table],
    lengths: Sequence[int],
    sizes: TokenSizes,
    max_shard_bytes: int,
    **facts: Any,
) -> None:
    """Add a batch to a version of the dataset, with the configs whose prompts are cut."""
    not_cut: dict[str, Counter[str]] = {}
    rows = _with_cuts(pairs, lengths, sizes, not_cut)
    version.add(
        key,
        chain(rows, (("positives", part) for part in agreed)),
        max_shard_bytes=max_shard_bytes,
        counted=sizes.name,
        not_cut=not_cut,
        **facts,
    )


def _with_cuts(
    pairs: Iterable[pa.Table],
    lengths: Sequence[int],
    sizes: TokenSizes,
    not_cut: dict[str, Counter[str]],
) -> Iterator[tuple[str, pa.Table]]:
    """Give rows of `pairs` with their lengths, and as rows of the configs that are cut."""
    for part in pairs:
        yield "pairs", (rows := with_needs(sizes.counted(part)))
        for length in sorted(set(lengths)):
            config = layout.config_of_length(length)
            yield config, cut_pairs(rows, length, sizes, not_cut.setdefault(config, Counter()))


def _derived(config: str, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """Give what else is published of some rows: states with a consensus, and what may be trained on."""
    if config == "positives":
        yield "prompts", layout.prompt_rows(rows, "completion", "agreement")
    elif config == "pairs":
        yield "prompts", layout.prompt_rows(rows, "chosen", "pair")
        yield "pairs_distillable", rows.filter(rows["is_distillable"])


def _in_full(table: pa.Table, states: PromptsOf | None, batch: str) -> Iterator[pa.Table]:
    """Give the rows of a table with their prompts, in parts."""
    for part in with_prompts(table, states):
        missing = pc.filter(part["state_id"], pc.is_null(part["state_messages_json"])).to_pylist()
        if missing:
            raise PublishError(
                f"batch {batch}: the state of {missing[0]} is gone, and with it its prompt; nothing "
                "was published. Run `replay-pipeline pairs` again"
            )
        yield part


def read_manifests(folder: Path) -> dict[str, dict[str, Any]]:
    """Give the manifests of a dataset folder, by batch."""
    return {
        batch: msgspec.json.decode((folder / path).read_bytes())
        for path in sorted(f"{layout.MANIFESTS}/{n}" for n in list_files(folder / layout.MANIFESTS))
        if (batch := layout.batch_of(path)) is not None
    }


def _as_batches(
    given: Iterable[tuple[str, pa.Table]] | Iterable[NormalizedDPOPair],
) -> list[tuple[str, pa.Table]]:
    items: list[Any] = list(given)
    if all(isinstance(item, tuple) for item in items):
        return items
    return [("pairs", table_with_prompts(items))]


def _by_key(batches: Iterable[tuple[str, pa.Table]]) -> dict[str, pa.Table]:
    tables: dict[str, pa.Table] = {}
    for key, table in batches:
        if not layout.is_batch_key(key):
            raise ConfigError(
                f"trace batch {key!r}: a key is up to 100 letters, digits, '.', '_' and '-', "
                "and begins with a letter or digit, since it names folders of the dataset"
            )
        if key in tables:
            raise ConfigError(f"trace batch {key!r} is given twice")
        tables[key] = table
    return tables


_SIDES = ["chosen", "rejected", "session_id", "conversation", "state_id"]


def _sides(pairs: pa.Table) -> Iterator[tuple[str, str, str]]:
    """Chosen, rejected and conversation of rows of the config `pairs`."""
    sides = (
        [layout.json_of(side[-1]) for side in pairs[name].to_pylist()]
        for name in ("chosen", "rejected")
    )
    return zip(*sides, layout.conversations_in(pairs, {}), strict=True)


def _shas(names: Mapping[str, Iterable[str | None]]) -> dict[str, list[str]]:
    """Return the hashes of names by side."""
    return {side: sorted(sha_of(each) for each in found if each) for side, found in names.items()}


def _sessions(table: pa.Table) -> list[str]:
    """Give the session of each row; a row without one is a session of its own."""
    return [
        session or state
        for session, state in zip(
            table["session_id"].to_pylist(), table["state_id"].to_pylist(), strict=True
        )
    ]


class SecretScan:
    """Scans every text of a batch once: states of one session share most of their messages."""

    def __init__(self, batch: str) -> None:
        self._batch = batch
        self._seen: set[int] = set()
        self._texts: list[str] = []
        self._places: list[str] = []
        self._n_chars = 0

    def take(self, rows: pa.Table, config: str) -> None:
        """Look at the texts of some rows; many are scanned at once.

        Raises:
            SecretFoundError: there is a secret.
        """
        names = [
            field.name
            for field in rows.schema
            if pa.types.is_string(field.type)
            or (
                pa.types.is_nested(field.type) and not pa.types.is_integer(field.type.field(0).type)
            )
        ]
        for row in rows.select(names).to_pylist():
            for name, value in row.items():
                for each in value if isinstance(value, list) else [value]:
                    text = layout.json_of(each) if isinstance(each, dict) else each
                    if not isinstance(text, str) or (sha := _sha(text)) in self._seen:
                        continue
                    self._seen.add(sha)
                    self._texts.append(text)
                    self._n_chars += len(text)
                    place = f"batch {self._batch}, {config}, state {row['state_id']}, {name}"
                    self._places.append(place)
        if len(self._texts) >= _SCANNED_AT_ONCE or self._n_chars >= _MAX_CHARS_AT_ONCE:
            self.finish()

    def finish(self) -> None:
        """Scan what is left."""
        _refuse_secrets(self._texts, self._places)
        self._texts, self._places, self._n_chars = [], [], 0


def _sha(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())


def _refuse_secrets(texts: Sequence[str], places: Sequence[str]) -> None:
    """Raise at the first secret; `places` say where each text is."""
    for start in range(0, len(texts), _SCANNED_AT_ONCE):
        try:
            found = find_secrets_in(texts[start : start + _SCANNED_AT_ONCE])
        except Exception as error:  # whatever stops the scanner stops the publication
            where = places[start]
            raise PublishError(f"{where}: could not be scanned for secrets ({error})") from error
        for hits, where in zip(found, places[start:], strict=False):
            if hits:
                _refuse(hits, where)


def _refuse(hits: Sequence[SecretHit], where: str) -> None:
    kinds = ", ".join(sorted({hit.kind for hit in hits}))
    raise SecretFoundError(
        f"{where}: holds a secret ({kinds}); nothing was published. Remove it at its source, "
        "ingest again, and revoke it if it is real"
    )
