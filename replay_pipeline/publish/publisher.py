"""Publish pairs as a dataset folder in the layout of the Hub, and on the Hub itself."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from replay_pipeline.errors import ConfigError, PublishError
from replay_pipeline.publish import batch_facts, layout
from replay_pipeline.publish.answers import ScoredAnswers
from replay_pipeline.publish.client_texts import ClientTextTable
from replay_pipeline.publish.earlier import HubOptions, Published
from replay_pipeline.publish.folder import alone
from replay_pipeline.publish.loading import problems_of_loading
from replay_pipeline.publish.splits import ConversationSplit, sha_of, sides_in
from replay_pipeline.publish.ties import conversations_of, messages_of, shared
from replay_pipeline.publish.version import (
    MAX_SHARD_BYTES,
    Cuts,
    NewBatch,
    PublishReport,
    Version,
)
from replay_pipeline.storage.pair_rows import PromptsOf, table_with_prompts, with_prompts
from replay_pipeline.storage.schemas import NORMALIZED_PAIRS, POSITIVES
from replay_pipeline.types import PAIR_LENGTHS, TEST_FRACTION, NormalizedDPOPair

pc: Any = pyarrow.compute  # makes its functions at import, unknown to type checkers


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
    cuts = Cuts(lengths=lengths, tokenizer=tokenizer, max_shard_bytes=max_shard_bytes)
    scored = {key: ScoredAnswers.of(table) for key, table in (logprobs or {}).items()}
    options = HubOptions(
        repo_id=repo_id, private=private, token=token, endpoint=endpoint, patience_s=patience_s
    )
    hub = options.open()
    with TemporaryDirectory(prefix="publish-") as aside, alone(folder):
        earlier = Published.at(folder, hub)
        facts = batch_facts.merge_facts(earlier.facts, batch_facts.general_facts(card_facts or {}))
        gone = batch_facts.Retracted.of(facts)
        keys = {*given, *agreed} - gone.batches
        given = {key: gone.without(given.get(key, NORMALIZED_PAIRS.empty_table())) for key in keys}
        agreed = {key: gone.without(agreed.get(key, POSITIVES.empty_table())) for key in keys}
        there = {key: each for key, each in earlier.manifests.items() if key not in keys}
        belong, named = conversations_of(keys, given, agreed, projects)
        said = messages_of(keys, belong, messages)
        sides, moved = earlier.sides(named)
        common = shared(said, batch_facts.n_with_message(there.values()))
        split = ConversationSplit.over(
            belong, test_fraction=test_fraction, sides=sides, ties=common
        )
        ties = {name: [project, *said.get(name, ())] for name, project in belong.items()}
        old = {key: m for key, m in there.items() if m.get("layout") != layout.VERSION}
        version = Version(Path(aside), facts=facts, owned=keys | old.keys(), before=earlier.before)
        for key in sorted(keys):
            texts, states = ClientTextTable(), prompts(key) if prompts else None
            rows = _rows_of(key, given[key], agreed[key], states, texts)
            told = batch_facts.stage_facts(card_facts or {}, key)
            more = {"stages": told, "scored": scored.get(key), "ties": ties, "texts": texts}
            version.add(cuts.of(key, *rows, split=split, **more))
        for key, *rows, texts, stages in _again(earlier, old, gone, named):
            version.add(cuts.of(key, *rows, split=split, stages=stages, texts=texts))
        version.know(batch_facts.side_facts(split.sides, moved, [*there.values(), *version.new]))
        version.measure(folder)
        report = version.write(folder, options, look)
        report = replace(report, answers_left_out=_left_out(scored.values()))
        return version.bring(folder, hub, options, report)


def _left_out(scored: Iterable[ScoredAnswers]) -> dict[str, int]:
    """Count the answers without token probabilities, by reason."""
    return dict(sorted(sum((each.left_out for each in scored), Counter[str]()).items()))


def _again(
    earlier: Published,
    manifests: Mapping[str, Mapping[str, Any]],
    gone: batch_facts.Retracted,
    conversations: Mapping[str, str],
) -> Iterator[tuple[Any, ...]]:
    """Yield batches of an older layout once more, since one dataset has one form of columns.

    Of each come its key, its pairs, its positives, the texts of clients, and what was told of its stages.
    """
    for key, manifest in sorted(manifests.items()):
        texts = earlier.texts(manifest)
        pairs, positive = (
            map(gone.without, earlier.rows(manifest, config, conversations, texts))
            for config in ("pairs", "positives")
        )
        yield key, pairs, positive, texts, manifest["stages"]


def shards_of(
    manifest: Mapping[str, Any],
    pairs: pa.Table,
    positives: pa.Table,
    *,
    facts: Mapping[str, Any],
    folder: Path,
    cuts: Cuts,
    prompts: PromptsOf | None = None,
    logprobs: pa.Table | None = None,
) -> dict[str, Path]:
    """Make the data files of a published batch again, of the same tables, with the splits it has.

    Args:
        manifest: what was published of the batch.
        pairs: its table `normalized_pairs`.
        positives: its table `positives`.
        facts: facts of the dataset, which say what was retracted.
        folder: where the files are made.
        cuts: the lengths that it was published in.
        prompts: where the states of the batch are.
        logprobs: its table `token_logprobs`, if that was published.

    Returns:
        The files by their path in the dataset.
    """
    key, gone = manifest["trace_batch"], batch_facts.Retracted.of(facts)
    version = Version(folder, facts=facts, owned={key}, before={})
    texts = ClientTextTable()
    version.add(
        cuts.of(
            key,
            *_rows_of(key, gone.without(pairs), gone.without(positives), prompts, texts),
            texts=texts,
            split=ConversationSplit(
                manifest["test_fraction"], sides_in(manifest.get("conversations", {}))
            ),
            stages=manifest["stages"],
            scored=None if logprobs is None else ScoredAnswers.of(logprobs),
        )
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
    new = batch_facts.Retracted(frozenset(map(sha_of, session_ids)), frozenset(batches))
    with TemporaryDirectory(prefix="publish-") as aside, alone(folder):
        version = _without(new, Published.at(folder, hub), Path(aside))
        report = version.write(folder, options)
        report = version.bring(folder, hub, options, report)
    if erase and hub is not None:
        hub.erase(lambda path: layout.batch_of(path) is not None)
    return report


def _without(new: batch_facts.Retracted, earlier: Published, aside: Path) -> Version:
    """Make the version of a dataset in which sessions and batches are left out."""
    there = earlier.manifests
    touched = {
        key
        for key, manifest in there.items()
        if key in new.batches
        or new.sessions & set(batch_facts.sessions_of(manifest))
        or manifest.get("layout") != layout.VERSION
    }
    sides, moved = earlier.sides({})
    fractions = [manifest["test_fraction"] for manifest in there.values()]
    split = ConversationSplit(max(fractions, default=TEST_FRACTION), sides)
    facts = batch_facts.merge_facts(earlier.facts, new.facts())
    version = Version(aside, facts=facts, owned=touched, before=earlier.before)
    for key in sorted(touched - new.batches):
        manifest, tokens = there[key], there[key].get("tokens", {})
        more = [name for name in manifest["files"] if name not in layout.CONFIGS]
        texts = earlier.texts(manifest)
        parts = (
            (config, new.without(part))
            for config in ["positives", "pairs", *more]
            for part in earlier.rows(manifest, config, {}, texts)
        )
        version.add(
            NewBatch(
                key=key,
                parts=parts,
                split=split,
                stages=manifest["stages"],
                counted=tokens.get("counted"),
                not_cut=tokens.get("not_cut") or {},
                texts=texts,
            )
        )
    stay = [manifest for key, manifest in there.items() if key not in touched]
    version.know(batch_facts.side_facts(sides, moved, [*stay, *version.new]))
    return version


def problems_on_hub(
    repo_id: str,
    *,
    token: str | None = None,
    endpoint: str | None = None,
    patience_s: float = 300.0,
) -> list[str]:
    """Load a dataset from the Hub, as `problems_of_loading` does, and return the problems.

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


def _rows_of(
    key: str,
    pairs: pa.Table,
    positives: pa.Table,
    states: PromptsOf | None,
    texts: ClientTextTable,
) -> tuple[Iterator[pa.Table], Iterator[pa.Table]]:
    """Return the rows of a batch as configs have them, in parts."""
    return (
        (layout.pair_rows(part, key, texts.keep) for part in _in_full(pairs, states, key)),
        (layout.positive_rows(part, key, texts.keep) for part in _in_full(positives, states, key)),
    )


def _in_full(table: pa.Table, states: PromptsOf | None, batch: str) -> Iterator[pa.Table]:
    """Yield the rows of a table with their prompts, in parts.

    Raises:
        PublishError: the state of a pair is missing.
    """
    for part in with_prompts(table, states):
        missing = pc.filter(part["state_id"], pc.is_null(part["state_messages_json"])).to_pylist()
        if missing:
            raise PublishError(
                f"batch {batch}: the state of {missing[0]} is missing, so its prompt can't be built; nothing was published. Run `replay-pipeline pairs` again"
            )
        yield part


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
