"""The version of a dataset that is there, and the next one.

The next version is built in a separate folder. Then the old files are replaced in one step.
"""

import importlib
import io
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from replay_pipeline.errors import MissingDependencyError, PublishError
from replay_pipeline.publish import batch_facts, card, layout
from replay_pipeline.publish.blind import WARN_ABOVE, blind_control, in_words
from replay_pipeline.publish.client_texts import ClientTextTable, texts_in
from replay_pipeline.publish.folder import file_contents, list_files, replace_files
from replay_pipeline.publish.lengths import TokenSizes, cut_pairs, measured
from replay_pipeline.publish.secret_scan import SecretScan, refuse_secrets, text_sha
from replay_pipeline.publish.splits import SPLITS, ConversationSplit, Split, name_sha
from replay_pipeline.types import REHEARSAL

logger = logging.getLogger(__name__)

pc: Any = pyarrow.compute  # makes its functions at import, unknown to type checkers
_SHORTEST = 1_024
_COUNTED = ("agreement_level", "outcome", "source", "student_model")

_ENOUGH_SIDES = 2_000
"""Pairs of which the prompt-blind control takes those that it looks at."""


@dataclass(frozen=True, kw_only=True)
class PublishReport:
    """The results of one publication."""

    dataset: str
    """The folder."""
    repo_id: str | None = None
    rows_by_split: dict[str, dict[str, int]] = field(default_factory=dict)
    """Number of rows in the whole dataset, by config and split."""
    batches: list[str] = field(default_factory=list)
    """Batches of this publication."""
    files_written: list[str] = field(default_factory=list)
    files_unchanged: list[str] = field(default_factory=list)
    files_removed: list[str] = field(default_factory=list)
    commit: str | None = None
    """Id of the new commit on the Hub. None if the Hub was up to date, or its answer was lost."""
    blind: dict[str, Any] | None = None
    """How often the chosen side can be guessed without the prompt, from `BlindControl`."""
    tag: str | None = None
    """Tag of this content. Equal content has an equal tag."""
    not_found: list[str] = field(default_factory=list)
    """Sessions and batches that were to be retracted and that the dataset doesn't have."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)


def open_hub(repo_id: str | None, **options: Any) -> Any:
    """Return the repository on the Hub, which may not exist yet, or None if none is named."""
    return None if repo_id is None else hub_room().HubDataset(repo_id, **options)


def hub_room() -> Any:
    """Return the module that needs the Hub's client. A plain folder doesn't need it.

    Raises:
        MissingDependencyError: the Hub's client is not installed.
    """
    try:
        return importlib.import_module("replay_pipeline.publish.hub")
    except ImportError as error:
        raise MissingDependencyError(
            f"the Hub's client is missing ({error}): pip install 'replay-pipeline[publish]'"
        ) from error


def read_manifests(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the manifests of a dataset folder, by batch."""
    return {
        batch: msgspec.json.decode((folder / path).read_bytes())
        for path in sorted(f"{layout.MANIFESTS}/{n}" for n in list_files(folder / layout.MANIFESTS))
        if (batch := layout.batch_of(path)) is not None
    }


@dataclass(frozen=True, kw_only=True)
class Published:
    """The dataset as it is in the folder and on the Hub."""

    folder: Path
    hub: Any
    """The repository, or None if you don't use one."""
    before: dict[str, dict[str, Any]]
    """Manifests of the folder, by batch."""
    manifests: dict[str, dict[str, Any]]
    """Manifests of all batches."""
    facts: dict[str, Any]

    @classmethod
    def at(cls, folder: Path, hub: Any) -> "Published":
        """Read the manifests of all batches, and the facts, from the folder and the Hub.

        Raises:
            PublishError: an older version of this program has published the dataset.
        """
        before = read_manifests(folder)
        manifests = dict(before)
        path = folder / layout.FACTS
        facts = json.loads(path.read_text("utf-8")) if path.exists() else {}
        if hub is not None and hub.exists():
            room = hub_room()
            head = hub.head()
            known = file_contents(folder, layout.MANIFESTS)
            manifests = {**room.remote_manifests(hub, head, known=known), **manifests}
            facts = batch_facts.merge_facts(room.remote_facts(hub, head), facts)
        if any(manifest.get("layout") != layout.VERSION for manifest in manifests.values()):
            where = folder if hub is None else f"{folder} or {hub.repo_id}"
            raise PublishError(
                f"{where}: another version of this program published this dataset; publish to a "
                "new place, or delete it"
            )
        return cls(folder=folder, hub=hub, before=before, manifests=manifests, facts=facts)

    def rows(self, manifest: Mapping[str, Any], config: str) -> Iterator[pa.Table]:
        """Yield the rows of a batch in a config, from the folder or else from the Hub."""
        batch = manifest["trace_batch"]
        for side in SPLITS:
            for name in manifest["files"].get(config, {}).get(side, {}):
                path = f"{layout.batch_dir(config, side, batch)}/{name}"
                local = self.folder / path
                file = local if local.exists() else self.hub.read(path, revision="main")
                yield from layout.read_shard(file, config)

    def texts(self, manifest: Mapping[str, Any]) -> ClientTextTable:
        """Return the client texts of a batch, from the folder or the Hub."""
        batch = manifest["trace_batch"]
        found = texts_in(self.folder, batch)
        if not found and manifest.get("client_texts") and self.hub is not None:
            for path in self.hub.head().files:
                if path.startswith(f"{layout.CLIENT_TEXTS}/{batch}/"):
                    data = io.BytesIO(self.hub.read(path, revision="main"))
                    found |= {row["hash"]: row for row in pq.read_table(data).to_pylist()}
        return ClientTextTable(found.values())


@dataclass(frozen=True, kw_only=True)
class NewBatch:
    """The tables and facts of a new batch."""

    key: str
    parts: Iterable[tuple[str, pa.Table]]
    """Rows of `pairs`, `positives`, and the configs with cut prompts, by config."""
    split: ConversationSplit
    """The split of each conversation."""
    stages: Mapping[str, Any]
    """The stages' facts about the batch."""
    ties: Mapping[str, Iterable[str | None]] = field(default_factory=dict)
    """What each conversation shares with others in its split."""
    not_cut: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Number of pairs too long for a cut config, by reason. Known after the parts are read."""
    texts: ClientTextTable = field(default_factory=ClientTextTable)
    """The client texts that rows name. Known after the parts are read."""


def with_cuts(
    pairs: Iterable[pa.Table],
    lengths: Iterable[int],
    sizes: TokenSizes,
    not_cut: dict[str, Counter[str]],
) -> Iterator[tuple[str, pa.Table]]:
    """Yield rows of `pairs` with their lengths, and as rows of the configs that are cut.

    `not_cut` counts the pairs that are too long for a config, by reason.
    """
    for part in pairs:
        yield "pairs", (rows := measured(part, sizes))
        for length in sorted(set(lengths)):
            config = layout.config_of_length(length)
            yield config, cut_pairs(rows, length, sizes, not_cut.setdefault(config, Counter()))


class _BatchFiles:
    """The files of a batch in the making, and what is counted while its rows pass."""

    def __init__(self, batch: NewBatch, folder: Path) -> None:
        self._batch, self._folder = batch, folder
        self._shards: dict[tuple[str, Split], layout.Shards] = {}
        self._scan = SecretScan(batch.key)
        self._sessions: dict[str, set[str]] = {side: set() for side in SPLITS}
        self._talks: dict[str, set[str]] = {side: set() for side in SPLITS}
        self._texts: set[str] = set()
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in _COUNTED}
        self._teachers: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._n_bytes: Counter[str] = Counter()
        self._fit: dict[str, Counter[str]] = {}
        """Pairs of each config by the power of two, in tokens, that they fit into."""
        self._longest: dict[str, int] = {}
        self._first: tuple[str, dict[str, Any]] | None = None
        """The row with the first state id, in any row order: last prompt message and sides."""

    def take(self, config: str, part: pa.Table) -> None:
        """Take in rows of a config, and what else is published of them."""
        self._scan.take(part, config)
        self._put(config, part)
        for name, rows in _derived(config, part):
            self._put(name, rows)
        named = [name for name in part["client_texts"].to_pylist() if name]
        self._texts.update(named)
        if config == "pairs":
            self._totals["n_with_texts"] += len(named)
            self._count(part)
        if "n_tokens" not in part.column_names:
            self._totals[f"n_{config}"] += len(part)
        else:
            lengths = part["n_tokens"].to_pylist()
            fit = self._fit.setdefault(config, Counter())
            fit.update(str(max(_SHORTEST, 1 << (n - 1).bit_length())) for n in lengths)
            self._longest[config] = max([self._longest.get(config, 0), *lengths])

    def _count(self, pairs: pa.Table) -> None:
        """Count rows of the config `pairs`."""
        for name, counts in self._counts.items():
            counts.update("none" if v is None else str(v) for v in pairs[name].to_pylist())
        self._teachers.update(pc.list_flatten(pairs["teachers_agreeing"]).to_pylist())
        self._totals["n_pairs"] += len(pairs)
        self._totals["n_distillable"] += pc.sum(pairs["is_distillable"]).as_py() or 0
        self._totals["n_sharing_vendor"] += pc.sum(pairs["shares_vendor"]).as_py() or 0
        self._totals["n_hints"] += len(pairs) - pairs["hint"].null_count
        for side in ("chosen", "rejected"):
            messages = pc.list_flatten(pairs[side]).to_pylist()
            self._n_bytes[side] += sum(len(layout.json_of(m).encode()) for m in messages)
        first = pc.min(pairs["state_id"]).as_py()
        if first is not None and (self._first is None or first < self._first[0]):
            row = pairs.slice(pc.index(pairs["state_id"], first).as_py(), 1).to_pylist()[0]
            shown = {n: row[n][-1] for n in ("prompt", "chosen", "rejected") if row[n]}
            self._first = first, {name: layout.json_of(each) for name, each in shown.items()}

    def _put(self, config: str, rows: pa.Table) -> None:
        if config in ("pairs", "positives", "answers"):
            self._totals["n_rehearsed"] += n_rehearsed(rows)
        split, batch = self._batch.split, self._batch
        sides = [split.of(each) for each in layout.conversations_in(rows)]
        for side in SPLITS:
            part = rows.filter(pa.array([s == side for s in sides], pa.bool_()))
            if (config, side) not in self._shards:
                self._shards[config, side] = layout.Shards(
                    self._folder / batch.key / config / side, layout.schema_of(config)
                )
            self._shards[config, side].add(part)
            self._sessions[side].update(_sessions_in(part))
            self._talks[side].update(layout.conversations_in(part))

    def close(self) -> tuple[dict[str, Path], dict[str, Any]]:
        """Return the files by their path in the dataset, and the manifest.

        The manifest has the files with their rows, and sums that can be added over batches.
        """
        self._scan.finish()
        batch, files = self._batch, dict[str, Path]()
        counts: dict[str, dict[str, dict[str, int]]] = {}
        for (config, side), shard in self._shards.items():
            shard.close()
            for name, path in shard.files.items():
                files[f"{layout.batch_dir(config, side, batch.key)}/{name}"] = path
                counts.setdefault(config, {}).setdefault(side, {})[name] = shard.n_rows[name]
        files |= batch.texts.write(self._folder, batch.key, self._texts)
        shared = {
            side: [name for each in found for name in batch.ties.get(each, ())]
            for side, found in self._talks.items()
        }
        ties = _shas(shared)
        totals = ("n_pairs", "n_distillable", "n_sharing_vendor", "n_hints")
        manifest = {
            "trace_batch": batch.key,
            "layout": layout.VERSION,
            "test_fraction": batch.split.test_fraction,
            "files": counts,
            "sessions": _shas(self._sessions),
            "conversations": _shas(self._talks),
            **({"ties": ties} if any(ties.values()) else {}),
            "counts": {name: _sorted(found) for name, found in self._counts.items()},
            "teachers_agreeing": _sorted(self._teachers),
            **{name: self._totals[name] for name in totals},
            "n_bytes": {side: self._n_bytes[side] for side in ("chosen", "rejected")},
            "stages": batch.stages,
            "sample": self._first[1] if self._first else None,
            "tokens": {
                "pairs": {name: _sorted(n) for name, n in sorted(self._fit.items())},
                "longest": _sorted(self._longest),
                "not_cut": {name: _sorted(n) for name, n in sorted(batch.not_cut.items())},
            },
        }
        if n_made_up := self._totals["n_rehearsed"]:
            manifest["n_rehearsed"] = n_made_up
        if self._texts:
            n_pairs, n_texts = self._totals["n_with_texts"], len(self._texts)
            manifest["client_texts"] = {"n_pairs": n_pairs, "n_texts": n_texts}
        return files, manifest


def _sorted(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items()))


class Version:
    """The next version of the dataset, with new content for the batches that it owns.

    Its files are first written to a separate folder, so that prompts are read in parts.
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

    def add(self, batch: NewBatch) -> None:
        """Write the files and the manifest of a batch.

        Raises:
            SecretFoundError: there is a secret in the rows.
        """
        made = _BatchFiles(batch, self._aside)
        for config, part in batch.parts:
            made.take(config, part)
        files, manifest = made.close()
        self._manifests[batch.key] = manifest
        self._files |= {**files, layout.manifest_path(batch.key): batch_facts.encode(manifest)}

    @property
    def new(self) -> list[dict[str, Any]]:
        """Return the manifests of the owned batches."""
        return list(self._manifests.values())

    def know(self, facts: Mapping[str, Any]) -> None:
        """Add facts of the dataset."""
        self._facts = batch_facts.merge_facts(self._facts, facts)

    def shards(self) -> dict[str, Path]:
        """Return the data files, by their path in the dataset."""
        return {name: data for name, data in self._files.items() if isinstance(data, Path)}

    def measure(self, folder: Path) -> None:
        """Measure how well the chosen side can be guessed without the prompt, and store it in the facts.

        If there are many batches, some are drawn by the hash of their keys. Unchanged batches count
        if their files are in the folder.
        """
        sides: list[tuple[str, str, str]] = []
        for key, manifest in sorted(
            (self._stay | self._manifests).items(), key=lambda one: text_sha(one[0])
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
        self,
        folder: Path,
        hub: Any,
        *,
        private: bool = True,
        look: Callable[[Path], object] | None = None,
    ) -> PublishReport:
        """Change the folder to this version, if a check of it finds no problem, and then the Hub."""
        here = {**self._stay, **self._manifests}
        refuse_rehearsal(here, hub and hub.repo_id)
        shared = {
            layout.FACTS: batch_facts.encode(self._facts),
            layout.CARD: card.render(here, self._facts),
        }
        for path, data in shared.items():
            refuse_secrets([data.decode()], [path])
        stale = {path for path in list_files(folder) if layout.batch_of(path) in self._owned}
        change = replace_files(folder, {**self._files, **shared}, stale - self._files.keys(), look)
        report = PublishReport(
            dataset=str(folder),
            repo_id=hub and hub.repo_id,
            rows_by_split=batch_facts.rows_by_split(here),
            batches=sorted(self._manifests),
            files_written=change.written,
            files_unchanged=change.unchanged,
            files_removed=change.removed,
            blind=self._facts.get("blind_control"),
            tag=f"data-{batch_facts.content_digest(here)}",
        )
        if hub is None:
            return report
        hub.ensure(private=private)
        room = hub_room()
        brings = room.Publication(
            batches=frozenset(self._owned),
            files={
                path: data
                for path, data in self._files.items()
                if not path.startswith(f"{layout.CLIENT_TEXTS}/")  # they belong to their makers
            },
            manifests=self._manifests,
            facts=self._facts,
            known=file_contents(folder, layout.MANIFESTS),
        )
        commit, tag, manifests = room.push(hub, brings)
        logger.info("%s: commit %s, tag %s", hub.repo_id, commit, tag)
        rows = batch_facts.rows_by_split(manifests)
        return replace(report, rows_by_split=rows, commit=commit, tag=tag)


def _derived(config: str, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """Yield what else is published of some rows: states with a consensus, and what may be trained on."""
    if config == "positives":
        yield "prompts", layout.published_prompts(rows, "completion")
    elif config == "pairs":
        yield "prompts", layout.published_prompts(rows, "chosen")
        yield "pairs_distillable", rows.filter(rows["is_distillable"])


_SIDES = ["chosen", "rejected", "session_id", "conversation", "state_id"]


def _sides(pairs: pa.Table) -> Iterator[tuple[str, str, str]]:
    """Yield chosen, rejected and conversation of rows of the config `pairs`."""
    sides = (
        [layout.json_of(side[-1]) for side in pairs[name].to_pylist()]
        for name in ("chosen", "rejected")
    )
    return zip(*sides, layout.conversations_in(pairs), strict=True)


def _shas(names: Mapping[str, Iterable[str | None]]) -> dict[str, list[str]]:
    """Return the hashes of names by side."""
    return {side: sorted(name_sha(each) for each in found if each) for side, found in names.items()}


def _sessions_in(table: pa.Table) -> list[str]:
    """Return the session of each row. A row without one counts as its own session."""
    return [
        session or state
        for session, state in zip(
            table["session_id"].to_pylist(), table["state_id"].to_pylist(), strict=True
        )
    ]


def n_rehearsed(rows: pa.Table) -> int:
    """Count the rows of a config in which a made-up answer has a vote.

    The rows themselves say so, not the settings, because teachers may have been renamed, and
    rehearsed batches may be mixed with others.
    """
    sources = rows["source"].to_pylist() if "source" in rows.column_names else [None] * len(rows)
    return sum(
        source == REHEARSAL or any(name.startswith(REHEARSAL) for name in teachers or ())
        for source, teachers in zip(sources, rows["teachers_agreeing"].to_pylist(), strict=True)
    )


def refuse_rehearsal(manifests: Mapping[str, Mapping[str, Any]], repo_id: str | None) -> None:
    """Refuse to push a dataset with even one made-up row.

    Raises:
        PublishError: a batch has a made-up row. Nothing was published.
    """
    play = {key: n for key, each in manifests.items() if (n := each.get("n_rehearsed"))}
    if repo_id is not None and play:
        raise PublishError(
            f"{sum(play.values())} rows were made up in a rehearsal (batch {', '.join(sorted(play))}): "
            f"made-up rows are never pushed to {repo_id}; nothing was published. Replay these batches "
            "with real teachers first"
        )
