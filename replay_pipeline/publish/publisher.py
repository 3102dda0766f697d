"""Publish pairs as a dataset folder in the layout of the Hub, and on the Hub itself."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.compute

from replay_pipeline.errors import ConfigError, PublishError
from replay_pipeline.publish import batch_facts, layout
from replay_pipeline.publish.batch_facts import session_hashes
from replay_pipeline.publish.client_texts import ClientTextTable
from replay_pipeline.publish.folder import alone
from replay_pipeline.publish.lengths import TokenSizes
from replay_pipeline.publish.splits import (
    ConversationSplit,
    conversations_of,
    long_messages,
    name_sha,
    shared,
)
from replay_pipeline.publish.version import (
    NewBatch,
    Published,
    PublishReport,
    Version,
    n_rehearsed,
    open_hub,
    read_manifests,
    refuse_rehearsal,
    with_cuts,
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
    messages: Callable[[str], Mapping[str, Collection[str]]] | None = None,
    look: Callable[[Path], object] | None = None,
    card_facts: Mapping[str, Any] | None = None,
    lengths: Sequence[int] = PAIR_LENGTHS,
    token: str | None = None,
    endpoint: str | None = None,
    patience_s: float = 300.0,
) -> PublishReport:
    """Publish batches to the dataset: add new ones, replace known ones, and keep the others.

    The folder changes from its old version to the new one in one step, and so does the Hub.
    Publishing the same rows again changes nothing.

    Args:
        batches: batch keys and tables `normalized_pairs`. Or plain pairs, which become the batch
            `pairs` and replace its earlier content.
        folder: the dataset folder. It is created if missing.
        repo_id: Hub dataset `owner/name` that gets the same content.
        positives: batch keys and tables `positives`, of the same or other batches.
        prompts: reader of the states' prompts, by batch key. Not needed for tables with the columns
            of `PROMPT`.
        private: whether a new repository is private.
        test_fraction: share of conversations in the test split, by hash. Conversations that were
            published before keep their split.
        messages: hashes of each conversation's long messages, by batch key. Two or three
            conversations that share a message go to one split. A message in more conversations
            counts as boilerplate.
        look: called with the folder of the new version before it replaces the old one. If it
            raises, the old version stays.
        card_facts: further facts for the card, as in `CardFacts`.
        lengths: lengths in tokens for configs with cut prompts, such as `pairs_8k`.
        token: token for the Hub. By default, `HF_TOKEN` or the one that `hf auth login` stored.
        endpoint: address of the Hub, if it isn't the public one.
        patience_s: seconds to wait for a Hub that is down.

    Raises:
        ConfigError: a batch key is invalid as a folder name or comes twice, or the repository name is
            invalid.
        SchemaError: prompts are missing, or a pair was not normalized.
        SecretFoundError: a secret is in the rows or in the card. Nothing was published.
        StorageError: the folder can't be written. It is unchanged.
        PublishError: a state is missing from its batch, or the dataset is of another version of this
            program, and nothing was published. Or the Hub
            refused: then the folder has the new version, and the Hub the old one.
        MissingDependencyError: the Hub's client isn't installed.
    """
    folder = Path(folder)
    given, agreed = _by_key(_as_batches(batches)), _by_key(positives)
    sizes = TokenSizes()
    # What may not be pushed is told before the Hub is asked, which may take minutes.
    made_up = {
        k: {"n_rehearsed": n_rehearsed(t)} for each in (given, agreed) for k, t in each.items()
    }
    refuse_rehearsal({**read_manifests(folder), **made_up}, repo_id)
    hub = open_hub(repo_id, token=token, endpoint=endpoint, patience_s=patience_s)
    with TemporaryDirectory(prefix="publish-") as aside, alone(folder):
        earlier = Published.at(folder, hub)
        facts = batch_facts.merge_facts(earlier.facts, batch_facts.general_facts(card_facts or {}))
        gone = batch_facts.Retracted.of(facts)
        keys = {*given, *agreed} - gone.batches
        given = {key: gone.without(given.get(key, NORMALIZED_PAIRS.empty_table())) for key in keys}
        agreed = {key: gone.without(agreed.get(key, POSITIVES.empty_table())) for key in keys}
        there = {key: each for key, each in earlier.manifests.items() if key not in keys}
        belong = conversations_of([*given.values(), *agreed.values()])
        said = long_messages(keys, belong, messages)
        sides = batch_facts.known_sides(earlier.manifests.values(), earlier.facts)
        common = shared(said, batch_facts.n_with_message(there.values()))
        split = ConversationSplit.over(
            belong, test_fraction=test_fraction, sides=sides, ties=common
        )
        ties = {name: said.get(name, ()) for name in belong}
        version = Version(Path(aside), facts=facts, owned=keys, before=earlier.before)
        for key in sorted(keys):
            texts, states = ClientTextTable(), prompts(key) if prompts else None
            not_cut: dict[str, Counter[str]] = {}
            pairs, positive = (
                map(partial(rows, batch=key, keep=texts.keep), _in_full(table, states, key))
                for rows, table in (
                    (layout.pair_rows, given[key]),
                    (layout.positive_rows, agreed[key]),
                )
            )
            parts = with_cuts(pairs, lengths, sizes, not_cut)
            version.add(
                NewBatch(
                    key=key,
                    parts=chain(parts, *map(layout.by_config, positive)),
                    split=split,
                    stages=batch_facts.stage_facts(card_facts or {}, key),
                    ties=ties,
                    not_cut=not_cut,
                    texts=texts,
                )
            )
        version.know(batch_facts.side_facts(split.sides, [*there.values(), *version.new]))
        version.measure(folder)
        return version.write(folder, hub, private=private, look=look)


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
    """Remove sessions or batches from the dataset for good. Later publications leave them out.

    Args:
        folder: the dataset folder.
        session_ids: sessions, of any batch.
        batches: whole batches.
        repo_id: Hub dataset to remove them from as well.
        erase: also delete the history of the Hub dataset, with its old files. Pinned tags and
            revisions are lost then.
        token: token for the Hub.
        endpoint: address of the Hub, if it isn't the public one.
        patience_s: seconds to wait for a Hub that is down.

    Raises:
        StorageError: the folder can't be written. It is unchanged.
        PublishError: the Hub refused. The folder has the new version, the Hub the old one.
    """
    hub = open_hub(repo_id, token=token, endpoint=endpoint, patience_s=patience_s)
    by_hash, named = {name_sha(each): each for each in session_ids}, set(batches)
    new = batch_facts.Retracted(frozenset(by_hash), frozenset(named))
    with TemporaryDirectory(prefix="publish-") as aside, alone(folder):
        earlier = Published.at(folder, hub)
        known = {sha for each in earlier.manifests.values() for sha in session_hashes(each)}
        not_found = [by_hash[sha] for sha in sorted(by_hash.keys() - known)]
        not_found += sorted(named - earlier.manifests.keys())
        report = _without(new, earlier, Path(aside)).write(folder, hub)
    if erase and hub is not None:
        hub.erase(lambda path: layout.batch_of(path) is not None)
    return replace(report, not_found=not_found)


def _without(new: batch_facts.Retracted, earlier: Published, aside: Path) -> Version:
    """Make the version of a dataset in which sessions and batches are left out."""
    there = earlier.manifests
    touched = {
        key
        for key, manifest in there.items()
        if key in new.batches or new.sessions & set(session_hashes(manifest))
    }
    sides = batch_facts.known_sides(there.values(), earlier.facts)
    fractions = [manifest["test_fraction"] for manifest in there.values()]
    split = ConversationSplit(max(fractions, default=TEST_FRACTION), sides)
    facts = batch_facts.merge_facts(earlier.facts, new.facts())
    version = Version(aside, facts=facts, owned=touched, before=earlier.before)
    for key in sorted(touched - new.batches):
        manifest = there[key]
        more = [name for name in manifest["files"] if name not in layout.CONFIGS]
        texts = earlier.texts(manifest)
        parts = (
            (config, new.without(part))
            for config in ["positives", "answers", "pairs", *more]
            for part in earlier.rows(manifest, config)
        )
        version.add(
            NewBatch(
                key=key,
                parts=parts,
                split=split,
                stages=manifest["stages"],
                not_cut=manifest["tokens"]["not_cut"],
                texts=texts,
            )
        )
    stay = [manifest for key, manifest in there.items() if key not in touched]
    version.know(batch_facts.side_facts(sides, [*stay, *version.new]))
    return version


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
