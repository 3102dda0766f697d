"""Preference operators: a data-juicer plugin whose operators see a whole pair instead of one text.

Every operator looks at both sides, so a recipe can't forget one. Its statistics have the side's
name, so values of the two sides can't be confused. data-juicer finds the operators through the
entry-point group `data_juicer.ops`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import xxhash
from data_juicer.ops import load_ops
from data_juicer.ops.base_op import OPERATORS, Deduplicator, Filter
from data_juicer.ops.deduplicator.document_deduplicator import DocumentDeduplicator
from data_juicer.utils.constant import Fields, HashKeys
from rensa import RMinHash  # pyrefly: ignore[missing-module-attribute]

from replay_pipeline.actions import canonical_action
from replay_pipeline.actions.keys import bare
from replay_pipeline.judge.feasibility import PromptState
from replay_pipeline.normalize.memory import (
    N_BANDS,
    CountedKeys,
    Memory,
    SeenKeys,
    SeenSketches,
)
from replay_pipeline.normalize.pair import (
    PROMPT,
    READ_COLUMNS,
    SIDES,
    Pair,
    View,
    check_view,
    string_leaves,
    text_of,
)
from replay_pipeline.normalize.recipe import inner_arguments
from replay_pipeline.redaction.redactor import find_secrets


@dataclass(frozen=True, slots=True)
class Finding:
    """What a filter found about a pair."""

    stats: Mapping[str, float]
    """Statistics by side and metric, such as `chosen.text_len`."""
    reason: tuple[str, str, str] | None = None
    """Field, value and limit for which the pair fails. None if it passes."""


class PairFilter(Filter):
    """A filter that judges both sides of a pair.

    By default it keeps a pair in which it finds no fault.
    """

    _batched_op = True
    metric: ClassVar[str] = ""
    """Name of the number of faults."""

    def __init__(
        self, *args: Any, mark_only: bool = False, explain: str = "", **kwargs: Any
    ) -> None:
        """With `mark_only` no row is dropped.

        :param mark_only: keep the rows and only report what was found.
        :param explain: keep field, value and limit of a finding under this name, as JSON.
        """
        super().__init__(*args, **kwargs)
        self.mark_only = mark_only
        self.explain = explain

    @property
    def title(self) -> str:
        """Return the name under which it reports what it drops."""
        return self._name

    def faults(self, pair: Pair) -> Mapping[str, Sequence[str]]:
        """Return the faults of each field in words."""
        raise NotImplementedError

    def judge(self, pairs: Sequence[Pair]) -> list[Finding]:
        """Return what is found about each pair."""
        return [self._finding(self.faults(pair)) for pair in pairs]

    def _finding(self, faults: Mapping[str, Sequence[str]]) -> Finding:
        stats = {f"{field}.{self.metric}": float(len(found)) for field, found in faults.items()}
        for field, found in faults.items():
            if found:
                return Finding(stats, (field, "; ".join(found), f"{self.metric} = 0"))
        return Finding(stats)

    def compute_stats_batched(self, samples: dict[str, Any]) -> dict[str, Any]:
        """Fill data-juicer's statistics. Its executors call this."""
        for stats, found in zip(samples[Fields.stats], self.judge(pairs_in(samples)), strict=True):
            stats |= found.stats
            stats[self._key] = json.dumps(found.reason) if found.reason else ""
        return samples

    def process_batched(self, samples: dict[str, Any]) -> Any:
        """Return which rows stay. data-juicer's executors call this."""
        return [self.mark_only or not stats[self._key] for stats in samples[Fields.stats]]

    @property
    def _key(self) -> str:
        """Return where its reason stands among the statistics: no two uses of an operator share one."""
        arguments = repr(sorted(getattr(self, "_init_kwargs", {}).items()))
        used = self.explain or f"{self._name}.{xxhash.xxh32_hexdigest(arguments.encode())}"
        return f"why.{used}"


def pairs_in(samples: Mapping[str, Sequence[Any]]) -> list[Pair]:
    """Return the pairs in lists of values, the form in which data-juicer calls an operator."""
    columns = {name: samples[name] for name in READ_COLUMNS if name in samples}
    return [
        Pair(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)
    ]


@OPERATORS.register_module("pair_each_side_filter")
class PairEachSideFilter(PairFilter):
    """Keeps a pair if both sides pass a filter of data-juicer."""

    def __init__(
        self,
        operator: str = "",
        arguments: dict | str | None = None,
        sides: list = list(SIDES),  # noqa: B006
        *args: Any,
        view: str = "text",
        **kwargs: Any,
    ) -> None:
        """View is what is judged of a side (`text`, `action`, `prose`).

        :param operator: name of a filter of data-juicer that reads a text.
        :param arguments: its parameters; as JSON text where a recipe uses this operator twice,
            since data-juicer's own command merges those of both uses.
        :param sides: the sides that it judges.
        :param view: the part of each side that is judged.

        Raises:
            ValueError: no operator is named, or a side is none of a pair.
        """
        super().__init__(*args, **kwargs)
        self.view: View = check_view(view)
        if not operator:
            raise ValueError(
                "operator is missing: name the filter of data-juicer that judges the sides"
            )
        if not sides or set(sides) - set(SIDES):
            raise ValueError(f"sides is {sides}, but must be some of {', '.join(SIDES)}")
        self.operator, self.sides, self._arguments = operator, sides, inner_arguments(arguments)
        self._filter: Any = load_ops([{operator: dict(self._arguments)}])[0]

    @property
    def title(self) -> str:
        """Return the name of the filter that judges."""
        return self.operator

    def judge(self, pairs: Sequence[Pair]) -> list[Finding]:
        """Judge by the filter's own statistics.

        data-juicer keeps one statistic per row and metric, so a second use of a filter would judge
        by the first one's value. Here the statistics start empty for each side.
        """
        if not pairs:
            return []
        stats: list[dict[str, float]] = [{} for _ in pairs]
        reasons: list[tuple[str, str, str] | None] = [None] * len(pairs)
        # In one order: executors sort what they are given.
        limit = ", ".join(f"{name}={self._arguments[name]}" for name in sorted(self._arguments))
        for side in self.sides:
            texts = [pair.view(side, self.view) for pair in pairs]
            samples = {self._filter.text_key: texts, Fields.stats: [{} for _ in pairs]}
            samples = self._filter.compute_stats_batched(samples)
            kept = list(self._filter.process_batched(samples))
            for row, measured in enumerate(samples[Fields.stats]):
                prefix = side if self.view == "text" else f"{side}.{self.view}"
                numbers = {k: v for k, v in measured.items() if isinstance(v, int | float)}
                stats[row] |= {f"{prefix}.{name}": value for name, value in numbers.items()}
                if not kept[row] and reasons[row] is None:
                    value = ", ".join(f"{name}={measured[name]}" for name in sorted(measured))
                    reasons[row] = (side, value, limit)
        return [Finding(*found) for found in zip(stats, reasons, strict=True)]


@OPERATORS.register_module("pair_identical_filter")
class PairIdenticalFilter(PairFilter):
    """Keeps a pair if its sides are different actions, whatever their call ids and key order."""

    metric = "is_identical"

    def faults(self, pair: Pair) -> dict[str, list[str]]:
        """Return whether the sides are the same action."""
        chosen, rejected = (pair.view(side, "canonical") for side in SIDES)
        is_lesson = pair.get("kind") is not None
        return {"pair": ["the same action"] * (chosen == rejected and not is_lesson)}


@OPERATORS.register_module("pair_tool_call_filter")
class PairToolCallFilter(PairFilter):
    """Keeps a pair if its sides are well formed: not empty, and calls of available tools."""

    metric = "n_faults"

    def __init__(self, is_tool_offered: bool = True, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001, FBT002
        """Initialization method.

        :param is_tool_offered: whether a called tool must be in the state's tools (where it has).
        """
        super().__init__(*args, **kwargs)
        self.is_tool_offered = is_tool_offered

    def faults(self, pair: Pair) -> dict[str, list[str]]:
        """Return what is wrong with each side."""
        offered = _tool_names(pair.get("tools_json")) if self.is_tool_offered else None
        found = {}
        for side, action in pair.actions.items():
            unknown = () if offered is None else sorted(set(action.tools) - offered)
            reason = action.invalid_reason
            # Extraction judges arguments by the schema; a tool of another client may share the name.
            if reason and not reason.startswith("schema_invalid"):
                found[side] = [reason]
            else:
                found[side] = [f"{name} is not offered" for name in unknown]
        return found


@lru_cache(maxsize=4096)
def _tool_names(tools_json: str | None) -> frozenset[str] | None:
    """Return names of the tools of a state; `None` where the state has no tool list."""
    tools = json.loads(tools_json) if tools_json else None
    if not tools:
        return None
    return frozenset(str(tool.get("function", tool).get("name")) for tool in tools)


@OPERATORS.register_module("pair_secret_filter")
class PairSecretFilter(PairFilter):
    """Keeps a pair if its prompt, sides, and hint contain no secret."""

    metric = "n_secrets"
    _COLUMNS: ClassVar[dict[str, str]] = {
        PROMPT: "prompt",
        **{column: side for side in SIDES for column in (f"{side}_action_json", side)},
        "hint": "hint",
    }

    def faults(self, pair: Pair) -> dict[str, list[str]]:
        """Return the kinds of secrets by field."""
        found: dict[str, set[str]] = {field: set() for field in self._COLUMNS.values()}
        for column, field in self._COLUMNS.items():
            for text in string_leaves(pair.get(column) or ""):
                found[field] |= _secret_kinds(text)
        return {field: sorted(kinds) for field, kinds in found.items()}


@lru_cache(maxsize=1 << 16)
def _secret_kinds(text: str) -> frozenset[str]:
    """Return the kinds of secrets in a text. The states of a session share most of their messages."""
    return frozenset(hit.kind for hit in find_secrets(text))


@OPERATORS.register_module("pair_feasibility_filter")
class PairFeasibilityFilter(PairFilter):
    """Keeps a pair if its chosen side is possible at the prompt, not done yet, and asked for."""

    metric = "obstacle"

    def faults(self, pair: Pair) -> dict[str, list[str]]:
        """Return why the chosen side can't work."""
        chosen, rejected = (pair.actions[side] for side in SIDES)
        if not chosen.is_valid:
            return {"chosen": []}
        found = PromptState(pair.prompt, rejected, cwd=pair.get("cwd")).obstacle(chosen)
        return {"chosen": [f"{found.kind}: {found.why}"] if found else []}


@OPERATORS.register_module("pair_worth_filter")
class PairWorthFilter(PairFilter):
    """Keeps a pair if its chosen side is more than bookkeeping, and no question that the prompt answers."""

    metric = "needless"

    def faults(self, pair: Pair) -> dict[str, list[str]]:
        """Return why the chosen side teaches nothing."""
        why = PromptState(pair.prompt, cwd=pair.get("cwd")).needless(pair.actions["chosen"])
        return {"chosen": [why] if why else []}


class PairDeduplicator(Deduplicator):
    """An operator that judges a pair by the pairs before it."""

    _batched_op = True
    _column = "__dj__pair_key__"

    def key(self, pair: Pair) -> bytes:
        """Return what is compared of a pair."""
        raise NotImplementedError

    def keys(self, pairs: Sequence[Pair]) -> list[bytes]:
        """Return what is compared of each pair."""
        return [self.key(pair) for pair in pairs]

    def new_memory(self, earlier: Any = None) -> Memory:
        """Return a new memory of pairs, on top of the memory of earlier batches."""
        raise NotImplementedError

    def compute_hash(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Add the key column to a batch of rows. data-juicer's executor calls this."""
        return {**sample, self._column: [key.hex() for key in self.keys(pairs_in(sample))]}

    def process(self, dataset: Any, show_num: int = 0) -> tuple[Any, dict]:  # noqa: ARG002
        """Choose among all rows, in order. data-juicer's executor calls this."""
        memory = self.new_memory()
        kept = [
            row
            for row, key in enumerate(dataset[self._column])
            if memory.refuse(bytes.fromhex(key)) is None
        ]
        return dataset.select(kept).remove_columns(self._column), {}


_CALL_ID = re.compile(rb'"(?:tool_call_id|id)"\s*:\s*"[^"\\]*"')


@OPERATORS.register_module("pair_exact_deduplicator")
class PairExactDeduplicator(PairDeduplicator):
    """Keeps only the first of several pairs with the same prompt and sides.

    Prompts are compared exactly except for call ids, so a different digit makes a different state.
    Sides are compared by data-juicer's own `document_deduplicator`.
    """

    def __init__(
        self,
        lowercase: bool = False,  # noqa: FBT001, FBT002
        ignore_non_character: bool = False,  # noqa: FBT001, FBT002
        *args: Any,
        view: str = "text",
        **kwargs: Any,
    ) -> None:
        """View is what is compared of a side (`text`, `action`, `canonical`).

        :param lowercase: whether the case of the sides is ignored.
        :param ignore_non_character: whether white space, digits and punctuation of the sides are.
        :param view: the part of each side that is compared.
        """
        super().__init__(*args, **kwargs)
        self.view: View = check_view(view)
        self._of_text = DocumentDeduplicator(lowercase, ignore_non_character)

    def key(self, pair: Pair) -> bytes:
        """Return a 128-bit digest of the prompt and both sides."""
        prompt = (pair.get(PROMPT) or pair.get("state_id") or "").encode()
        parts = [xxhash.xxh3_128_digest(_CALL_ID.sub(b"", prompt))]
        for side in SIDES:
            text = {self._of_text.text_key: pair.view(side, self.view)}
            hashed = DocumentDeduplicator.compute_hash(self._of_text, text)
            parts.append(hashed[HashKeys.hash].encode())
        return xxhash.xxh3_128_digest(b"".join(parts))

    def new_memory(self, earlier: Any = None) -> SeenKeys:
        """Return a memory of every digest."""
        return SeenKeys(earlier)


@OPERATORS.register_module("pair_action_cap")
class PairActionCap(PairDeduplicator):
    """Keeps at most so many pairs with the same chosen action, in a conversation and in the dataset."""

    def __init__(
        self, per_conversation: int = 2, per_dataset: int = 20, *args: Any, **kwargs: Any
    ) -> None:
        """Initialization method.

        :param per_conversation: the most pairs of one conversation with one chosen action.
        :param per_dataset: the most pairs with one chosen action.

        Raises:
            ValueError: a cap is below 1.
        """
        super().__init__(*args, **kwargs)
        if min(per_conversation, per_dataset) < 1:
            raise ValueError("per_conversation and per_dataset must be at least 1")
        self.per_conversation, self.per_dataset = per_conversation, per_dataset

    def key(self, pair: Pair) -> bytes:
        """Return digests of the chosen action and of the conversation."""
        first = pair.prompt[:2] if pair.get("conversation") is None else pair.get("conversation")
        does = [
            bare(str(call.values().get("command")))
            if call.name == "Bash"
            else f"{call.name} {call.shown()}"
            for call in pair.actions["chosen"].calls
        ]
        parts = ("\n".join(does) or pair.view("chosen", "text"), json.dumps(first, default=str))
        return b"".join(xxhash.xxh3_128_digest(part.encode("utf-8", "replace")) for part in parts)

    def new_memory(self, earlier: Any = None) -> CountedKeys:
        """Return a memory of how often each action passed."""
        return CountedKeys(self.per_conversation, self.per_dataset, earlier)


@OPERATORS.register_module("pair_near_deduplicator")
class PairNearDeduplicator(PairDeduplicator):
    """Keeps only the first of several nearly equal pairs at nearly equal prompts.

    It compares word shingles by MinHash in four parts of equal weight: the last request, the last
    message, chosen, and rejected. So the same consensus at another point of a session isn't a
    duplicate.
    """

    def __init__(
        self,
        jaccard_threshold: float = 0.8,
        window_size: int = 5,
        num_permutations: int = 128,
        max_prompt_words: int = 200,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Initialization method.

        :param jaccard_threshold: similarity from which a pair is a duplicate.
        :param window_size: words of a shingle.
        :param num_permutations: values of a MinHash signature, a multiple of 16.
        :param max_prompt_words: words of the last request, and of the last message, that are compared.

        Raises:
            ValueError: a parameter is out of its range.
        """
        super().__init__(*args, **kwargs)
        if not 0 < jaccard_threshold <= 1:
            raise ValueError(
                f"jaccard_threshold is {jaccard_threshold}, but must be above 0 and at most 1"
            )
        if window_size < 1 or num_permutations < N_BANDS or num_permutations % N_BANDS:
            raise ValueError(
                f"window_size={window_size} must be at least 1, and num_permutations={num_permutations} a multiple of {N_BANDS}"
            )
        self.jaccard_threshold, self.window_size = jaccard_threshold, window_size
        self.num_permutations, self.max_prompt_words = num_permutations, max_prompt_words

    def key(self, pair: Pair) -> bytes:
        """Return the MinHash signature of a pair."""
        sketch = RMinHash(num_perm=self.num_permutations, seed=1)
        request, last = (text.split()[-self.max_prompt_words :] for text in _last_texts(pair))
        chosen, rejected = (pair.view(side, "action").split() for side in SIDES)
        marked = (("u", request), ("p", last), ("c", chosen), ("r", rejected))
        parts = [self._shingles(mark, words) for mark, words in marked]
        # Each part counts alike: a long prompt does not make two pairs of one whose sides differ.
        most = max(map(len, parts))
        for shingles in parts:
            for turn in range(-(-most // len(shingles))):
                sketch.update([f"{turn}{shingle}" for shingle in shingles])
        return np.array(sketch.digest(), np.uint32).tobytes()

    def _shingles(self, mark: str, words: list[str]) -> list[str]:
        n_shingles = max(len(words) - self.window_size + 1, 1)
        return [
            mark + " ".join(words[start : start + self.window_size]).lower()
            for start in range(n_shingles)
        ]

    def new_memory(self, earlier: Any = None) -> SeenSketches:
        """Return a memory of every signature."""
        return SeenSketches(self.jaccard_threshold, earlier)


def _last_texts(pair: Pair) -> tuple[str, str]:
    """Return the last user text of a prompt, and the text of its last message."""
    asked = [message for message in pair.prompt if message.get("role") == "user"][-1:]
    texts = [text_of(canonical_action(message)) for message in (*asked, *pair.prompt[-1:])]
    return (texts[0], texts[-1]) if texts else ("", "")
