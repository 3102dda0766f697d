"""Preference operators: a data-juicer plugin whose operators see a whole pair instead of one text.

Every operator looks at both sides, so a recipe can't forget one. Its statistics have the side's
name, so values of the two sides can't be confused. Operators are vectorized over Arrow columns.
data-juicer finds them through the entry-point group `data_juicer.ops`.
"""

import json
import re
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from data_juicer.ops import load_ops
from data_juicer.ops.base_op import OPERATORS, Deduplicator, Filter, Mapper
from data_juicer.ops.common.special_characters import SPECIAL_CHARACTERS
from data_juicer.utils.constant import Fields
from rensa import RMinHash  # pyrefly: ignore[missing-module-attribute]

from replay_pipeline.actions import Action, canonical_action
from replay_pipeline.judge.feasibility import PromptState
from replay_pipeline.normalize.kernels import character_class, repetition_ratio, text_digests
from replay_pipeline.normalize.recipe import inner_arguments
from replay_pipeline.normalize.stock import filter_rows, map_rows
from replay_pipeline.normalize.verdict import (
    N_BANDS,
    CountedKeys,
    Measure,
    Memory,
    RowVerdict,
    SeenKeys,
    SeenSketches,
)
from replay_pipeline.normalize.views import (
    PROMPT,
    SIDES,
    PairBatch,
    ParsedAction,
    View,
    check_view,
    last_texts,
    prompt_text,
    read_side,
    string_leaves,
    text_message,
)
from replay_pipeline.redaction.redactor import find_secrets
from replay_pipeline.storage.pair_rows import json_value

SPECIAL = character_class(SPECIAL_CHARACTERS)


class PairFilter(Filter):
    """A filter that measures both sides of a pair, and keeps a row if all values are in range."""

    _batched_op = True

    def __init__(
        self,
        *args: Any,
        view: str = "text",
        mark_only: bool = False,
        explain: str = "",
        **kwargs: Any,
    ) -> None:
        """View is what is judged (`text`, `action`, `prose`); with `mark_only` no row is dropped.

        :param view: the part of each side that is judged.
        :param mark_only: keep the rows and only report what was found.
        :param explain: keep field, value and limit of a finding under this name, as JSON.
        """
        super().__init__(*args, **kwargs)
        self.view: View = check_view(view)
        self.bounds: tuple[float | None, float | None] = (None, None)
        self.mark_only = mark_only
        self.explain = explain

    def measure(self, batch: PairBatch, alive: np.ndarray) -> list[Measure]:
        """Return the statistics of every row. Dropped rows may have 0."""
        raise NotImplementedError

    def judge(self, batch: PairBatch, alive: np.ndarray) -> RowVerdict:
        """Return which rows fail, with the first measure that is out of range."""
        verdict = RowVerdict.of(len(batch), self.measure(batch, alive))
        for measure in verdict.measures:
            for row in np.flatnonzero(self._is_out(measure) & ~verdict.fails).tolist():
                verdict.fail([row], measure.field, measure.value(row), measure.limit)
        return verdict

    def _is_out(self, measure: Measure) -> np.ndarray:
        inside = np.ones(len(measure.values), bool)
        if measure.minimum is not None:
            compare = np.greater_equal if self.min_closed_interval else np.greater
            inside &= compare(measure.values, measure.minimum)
        if measure.maximum is not None:
            compare = np.less_equal if self.max_closed_interval else np.less
            inside &= compare(measure.values, measure.maximum)
        return inside if self.reversed_range else ~inside

    def metric(self, name: str) -> str:
        """Return the name of a metric, with its view unless that is the plain text."""
        return name if self.view == "text" else f"{self.view}.{name}"

    def per_side(self, metric: str, values_of: Callable[[str], np.ndarray]) -> list[Measure]:
        """Return the measures of both sides, with the bounds of this operator."""
        return [
            Measure(
                field=side,
                metric=metric,
                values=values_of(side),
                minimum=self.bounds[0],
                maximum=self.bounds[1],
            )
            for side in SIDES
        ]

    def compute_stats_batched(self, samples: dict[str, Any]) -> dict[str, Any]:
        """Fill data-juicer's statistics. Its executors call this."""
        batch = PairBatch.from_samples(samples)
        verdict = self.judge(batch, np.ones(len(batch), bool))
        for row, stats in enumerate(samples[Fields.stats]):
            stats |= {measure.key: measure.values[row].item() for measure in verdict.measures}
            stats[self._flag] = bool(verdict.fails[row]) and not self.mark_only
            if self.explain:
                stats[f"why.{self.explain}"] = verdict.reason(row)
        return samples

    def process_batched(self, samples: dict[str, Any]) -> Any:
        """Return which rows stay. data-juicer's executors call this."""
        return [not stats[self._flag] for stats in samples[Fields.stats]]

    @property
    def _flag(self) -> str:
        arguments = sorted(getattr(self, "_init_kwargs", {}).items())
        return f"{self._name}.{xxhash.xxh32_hexdigest(repr(arguments).encode())}.is_out"


@OPERATORS.register_module("pair_text_length_filter")
class PairTextLengthFilter(PairFilter):
    """Keeps a pair if the number of characters of each side is in range."""

    def __init__(
        self, min_len: int = 1, max_len: int = sys.maxsize, *args: Any, **kwargs: Any
    ) -> None:
        """Initialization method.

        :param min_len: fewest characters of a side.
        :param max_len: most characters of a side.
        """
        super().__init__(*args, **kwargs)
        self.bounds = min_len, max_len

    def measure(self, batch: PairBatch, alive: np.ndarray) -> list[Measure]:  # noqa: ARG002
        """Return characters per side."""
        name = self.metric("text_len")
        return self.per_side(name, lambda side: batch.stats(side, self.view, SPECIAL).n_chars)


@OPERATORS.register_module("pair_words_num_filter")
class PairWordsNumFilter(PairFilter):
    """Keeps a pair if the number of words of each side is in range."""

    def __init__(
        self, min_num: int = 1, max_num: int = sys.maxsize, *args: Any, **kwargs: Any
    ) -> None:
        """Initialization method.

        :param min_num: fewest words of a side; a word holds a character that is not special.
        :param max_num: most words of a side.
        """
        super().__init__(*args, **kwargs)
        self.bounds = min_num, max_num

    def measure(self, batch: PairBatch, alive: np.ndarray) -> list[Measure]:  # noqa: ARG002
        """Return words per side."""
        name = self.metric("num_words")
        return self.per_side(name, lambda side: batch.stats(side, self.view, SPECIAL).n_words)


@OPERATORS.register_module("pair_special_characters_filter")
class PairSpecialCharactersFilter(PairFilter):
    """Keeps a pair if the share of special characters of each side is in range."""

    def __init__(
        self, min_ratio: float = 0.0, max_ratio: float = 0.5, *args: Any, **kwargs: Any
    ) -> None:
        """Initialization method.

        :param min_ratio: least share of special characters of a side.
        :param max_ratio: largest share of special characters of a side.
        """
        super().__init__(*args, **kwargs)
        self.bounds = min_ratio, max_ratio

    def measure(self, batch: PairBatch, alive: np.ndarray) -> list[Measure]:  # noqa: ARG002
        """Share of special characters per side."""
        name = self.metric("special_char_ratio")
        return self.per_side(name, lambda side: batch.stats(side, self.view, SPECIAL).special_ratio)


@OPERATORS.register_module("pair_character_repetition_filter")
class PairCharacterRepetitionFilter(PairFilter):
    """Keeps a pair if neither side repeats itself too much."""

    def __init__(
        self,
        rep_len: int = 10,
        min_ratio: float = 0.0,
        max_ratio: float = 0.6,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Initialization method.

        :param rep_len: length of the character windows that are counted.
        :param min_ratio: least share of repeated windows.
        :param max_ratio: largest share of repeated windows.

        Raises:
            ValueError: `rep_len` is below 1.
        """
        super().__init__(*args, **kwargs)
        if rep_len < 1:
            raise ValueError(f"rep_len is {rep_len}, but must be at least 1 character")
        self.rep_len, self.bounds = rep_len, (min_ratio, max_ratio)

    def measure(self, batch: PairBatch, alive: np.ndarray) -> list[Measure]:
        """Share of repeated windows per side."""
        name = self.metric("char_rep_ratio")
        return self.per_side(name, lambda side: self._ratios(batch, side, alive))

    def _ratios(self, batch: PairBatch, side: str, alive: np.ndarray) -> np.ndarray:
        texts = batch.view(side, self.view)
        ratios = np.zeros(len(batch))
        for row in np.flatnonzero(alive):
            ratios[row] = repetition_ratio(texts[row].as_py() or "", self.rep_len)
        return ratios


@OPERATORS.register_module("pair_identical_filter")
class PairIdenticalFilter(PairFilter):
    """Keeps a pair if its sides differ in more than call ids, key order, and outer white space."""

    def measure(self, batch: PairBatch, alive: np.ndarray) -> list[Measure]:  # noqa: ARG002
        """Return 1 if the sides are the same action, else 0."""
        chosen, rejected = (batch.view(side, "canonical").to_pylist() for side in SIDES)
        same = np.array([a == b for a, b in zip(chosen, rejected, strict=True)], float)
        return [Measure(field="pair", metric="is_identical", values=same, maximum=0)]


@OPERATORS.register_module("pair_tool_call_filter")
class PairToolCallFilter(PairFilter):
    """Keeps a pair if its tool calls are well formed: an available tool, with arguments, and not empty."""

    def __init__(self, is_tool_offered: bool = True, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001, FBT002
        """Initialization method.

        :param is_tool_offered: whether a called tool must be in the state's tools (where it has).
        """
        super().__init__(*args, **kwargs)
        self.is_tool_offered = is_tool_offered

    def measure(self, batch: PairBatch, alive: np.ndarray) -> list[Measure]:
        """Return the faults of each side in words."""
        offered = [_tool_names(tools) for tools in batch.values("tools_json")]
        measures = []
        for side in SIDES:
            notes = [
                self._faults(action, names) if is_alive else ""
                for action, names, is_alive in zip(
                    batch.actions[side], offered, alive.tolist(), strict=True
                )
            ]
            count = np.array([note.count(";") + 1 if note else 0 for note in notes], float)
            measures.append(
                Measure(field=side, metric="n_faults", values=count, maximum=0, notes=notes)
            )
        return measures

    def _faults(self, action: ParsedAction, offered: frozenset[str] | None) -> str:
        faults = [] if action.text.strip() or action.calls else ["empty turn"]
        for call in action.calls:
            if not call.name:
                faults.append("call without a name")
            elif self.is_tool_offered and offered is not None and call.name not in offered:
                faults.append(f"{call.name} is not offered")
            if isinstance(call.arguments, str):
                faults.append(f"arguments of {call.name or 'a call'} are not a JSON object")
        return "; ".join(faults)


@lru_cache(maxsize=4096)
def _tool_names(tools_json: str | None) -> frozenset[str] | None:
    """Return names of the tools of a state; `None` where the state has no tool list."""
    tools = json.loads(tools_json) if tools_json else None
    if not tools:
        return None
    return frozenset(str(tool.get("function", tool).get("name")) for tool in tools)


class PairDeduplicator(Deduplicator):
    """An operator that judges a row by the rows before it."""

    _batched_op = True
    _column = "__dj__pair_key__"

    def __init__(self, *args: Any, view: str = "text", **kwargs: Any) -> None:
        """View is what is compared (`text`, `action`, `canonical`).

        :param view: the part of each side that is compared.
        """
        self.view: View = check_view(view)
        super().__init__(*args, **kwargs)

    def keys(self, batch: PairBatch, alive: np.ndarray) -> list[bytes]:
        """Return the key of each row, or empty bytes for a row that is already dropped."""
        raise NotImplementedError

    def new_memory(self, earlier: Any = None) -> Memory:
        """Return a new memory of rows, on top of the memory of earlier batches."""
        raise NotImplementedError

    def judge(self, batch: PairBatch, alive: np.ndarray, memory: Memory) -> RowVerdict:
        """Return which rows fail, and add the others to the memory."""
        verdict = RowVerdict.of(len(batch))
        keys = self.keys(batch, alive)
        for row in np.flatnonzero(alive):
            if (reason := memory.refuse(keys[row])) is not None:
                verdict.fail([row], "pair", *reason)
        return verdict

    def compute_hash(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Add the key column to a batch of rows. data-juicer's executor calls this."""
        batch = PairBatch.from_samples(sample)
        keys = self.keys(batch, np.ones(len(batch), bool))
        return {**sample, self._column: [key.hex() for key in keys]}

    def process(self, dataset: Any, show_num: int = 0) -> tuple[Any, dict]:  # noqa: ARG002
        """Choose among all rows, in order. data-juicer's executor calls this."""
        memory = self.new_memory()
        kept = [
            row
            for row, key in enumerate(dataset[self._column])
            if memory.refuse(bytes.fromhex(key)) is None
        ]
        return dataset.select(kept).remove_columns(self._column), {}


_PARTS = ("prompt", *SIDES)
_CALL_ID = re.compile(rb'"(?:tool_call_id|id)"\s*:\s*"[^"\\]*"')


@OPERATORS.register_module("pair_exact_deduplicator")
class PairExactDeduplicator(PairDeduplicator):
    """Keeps only the first of several pairs with the same prompt and sides.

    Prompts are compared exactly except for call ids, so a different digit makes a different state.
    `lowercase` and `ignore_non_character` apply to both sides.
    """

    def __init__(
        self,
        lowercase: bool = False,  # noqa: FBT001, FBT002
        ignore_non_character: bool = False,  # noqa: FBT001, FBT002
        keys: list = list(_PARTS),  # noqa: B006
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Initialization method.

        :param lowercase: whether the case of the sides is ignored.
        :param ignore_non_character: whether white space, digits and punctuation of the sides are.
        :param keys: the parts that make two pairs the same, of prompt, chosen and rejected.

        Raises:
            ValueError: `keys` names a part that pairs do not have.
        """
        super().__init__(*args, **kwargs)
        if not keys or set(keys) - set(_PARTS):
            raise ValueError(f"keys is {keys}, but must be some of {', '.join(_PARTS)}")
        self.lowercase, self.ignore_non_character = lowercase, ignore_non_character
        self.key_parts = tuple(keys)

    def keys(self, batch: PairBatch, alive: np.ndarray) -> list[bytes]:
        """Return a 128-bit digest of the compared parts."""
        parts = [self._part(batch, part) for part in self.key_parts]
        return [
            xxhash.xxh3_128_digest(b"".join(row)) if is_alive else b""
            for is_alive, row in zip(alive.tolist(), zip(*parts, strict=True), strict=True)
        ]

    def _part(self, batch: PairBatch, part: str) -> list[bytes]:
        if part == "prompt":
            return prompt_digests(batch)
        return text_digests(
            batch.view(part, self.view),
            lowercase=self.lowercase,
            ignore_non_character=self.ignore_non_character,
        )

    def new_memory(self, earlier: Any = None) -> SeenKeys:
        """Return a memory of every digest."""
        return SeenKeys(earlier)


def prompt_digests(batch: PairBatch) -> list[bytes]:
    """Return a digest of each prompt without call ids. If a row only names its state, use the state's id."""
    prompts = batch.column(PROMPT)
    if prompts.null_count == len(prompts):
        prompts = batch.column("state_id")
    prompts = prompts.cast(pa.large_binary())
    return [xxhash.xxh3_128_digest(_CALL_ID.sub(b"", prompt.as_py() or b"")) for prompt in prompts]


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
        view: str = "action",
        **kwargs: Any,
    ) -> None:
        """Initialization method.

        :param jaccard_threshold: similarity from which a pair is a duplicate.
        :param window_size: words of a shingle.
        :param num_permutations: values of a MinHash signature, a multiple of 16.
        :param max_prompt_words: words of the last request, and of the last message, that are compared.
        :param view: the part of each side that is compared.

        Raises:
            ValueError: a parameter is out of its range.
        """
        super().__init__(*args, view=view, **kwargs)
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

    def keys(self, batch: PairBatch, alive: np.ndarray) -> list[bytes]:
        """Return the MinHash signature of each row."""
        sides = [batch.view(side, self.view).to_pylist() for side in SIDES]
        prompts = batch.values(PROMPT)
        return [
            self._signature(prompt, chosen, rejected) if is_alive else b""
            for is_alive, prompt, chosen, rejected in zip(
                alive.tolist(), prompts, *sides, strict=True
            )
        ]

    def _signature(self, prompt: str | None, chosen: str, rejected: str) -> bytes:
        sketch = RMinHash(num_perm=self.num_permutations, seed=1)
        request, last = (text.split()[-self.max_prompt_words :] for text in last_texts(prompt))
        sides = (("u", request), ("p", last), ("c", chosen.split()), ("r", rejected.split()))
        parts = [self._shingles(mark, words) for mark, words in sides]
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


@OPERATORS.register_module("pair_session_cap_filter")
class PairSessionCapFilter(PairDeduplicator):
    """Limits how many pairs come from one session, and from one action within a session."""

    def __init__(
        self,
        max_pairs: int = 1000,
        max_repeats: int = 20,
        *args: Any,
        view: str = "canonical",
        **kwargs: Any,
    ) -> None:
        """Initialization method.

        :param max_pairs: most pairs of one session.
        :param max_repeats: most pairs of one session with the same chosen action.
        :param view: the part of the chosen side that is compared.

        Raises:
            ValueError: a limit is below 1.
        """
        super().__init__(*args, view=view, **kwargs)
        if min(max_pairs, max_repeats) < 1:
            raise ValueError("max_pairs and max_repeats must be at least 1")
        self.max_pairs, self.max_repeats = max_pairs, max_repeats

    def keys(self, batch: PairBatch, alive: np.ndarray) -> list[bytes]:
        """Return digests of the session and of its chosen action."""
        chosen = batch.view("chosen", self.view).to_pylist()
        return [
            xxhash.xxh3_128_digest(session.encode()) + xxhash.xxh3_128_digest(action.encode())
            if is_alive
            else b""
            for is_alive, session, action in zip(
                alive.tolist(), _sessions(batch), chosen, strict=True
            )
        ]

    def new_memory(self, earlier: Any = None) -> CountedKeys:
        """Return a counter of sessions and their actions."""
        return CountedKeys(self.max_pairs, self.max_repeats, earlier)


def _sessions(batch: PairBatch) -> list[str]:
    """Return the session of each row; rows without one are sessions of their own."""
    states = batch.values("state_id")
    return [
        session or f"\0{state}"
        for session, state in zip(batch.values("session_id"), states, strict=True)
    ]


@OPERATORS.register_module("pair_length_bias_filter")
class PairLengthBiasFilter(PairFilter):
    """Keeps a pair if neither side is many times as long as the other."""

    def __init__(self, max_ratio: float = 20.0, *args: Any, **kwargs: Any) -> None:
        """Initialization method.

        :param max_ratio: how many times as long one side may be.

        Raises:
            ValueError: `max_ratio` is below 1.
        """
        super().__init__(*args, **kwargs)
        if max_ratio < 1:
            raise ValueError(f"max_ratio is {max_ratio}, but must be at least 1")
        self.max_ratio = max_ratio

    def measure(self, batch: PairBatch, alive: np.ndarray) -> list[Measure]:  # noqa: ARG002
        """Return the length of chosen divided by that of rejected, each plus one."""
        chosen, rejected = (batch.stats(side, self.view, SPECIAL).n_chars + 1 for side in SIDES)
        return [
            Measure(
                field="pair",
                metric=self.metric("length_ratio"),
                values=chosen / rejected,
                minimum=1 / self.max_ratio,
                maximum=self.max_ratio,
            )
        ]


@OPERATORS.register_module("pair_prompt_leak_filter")
class PairPromptLeakFilter(PairFilter):
    """Keeps a pair if its sides aren't copied from their own prompt."""

    def __init__(
        self, min_len: int = 80, max_ratio: float = 0.9, *args: Any, **kwargs: Any
    ) -> None:
        """Initialization method.

        :param min_len: characters from which a text of an action can be a copy.
        :param max_ratio: largest share of such texts that stands word by word in the prompt.
        """
        super().__init__(*args, **kwargs)
        self.min_len, self.bounds = min_len, (None, max_ratio)

    def measure(self, batch: PairBatch, alive: np.ndarray) -> list[Measure]:
        """Return the share of long texts of each side that the prompt already contains."""
        prompts = [
            prompt_text(prompt) if is_alive else ""
            for prompt, is_alive in zip(batch.values(PROMPT), alive.tolist(), strict=True)
        ]
        return self.per_side(
            "copied_ratio",
            lambda side: np.array(
                [self._copied(*row) for row in zip(batch.actions[side], prompts, strict=True)]
            ),
        )

    def _copied(self, action: ParsedAction, prompt: str) -> float:
        texts = [text for text in action.texts() if len(text) >= self.min_len]
        n_copied = sum(len(text) for text in texts if text in prompt)
        return n_copied / max(sum(map(len, texts)), 1)


@OPERATORS.register_module("pair_degenerate_filter")
class PairDegenerateFilter(PairFilter):
    """Keeps a pair if its sides differ in more than case, white space, and punctuation."""

    def measure(self, batch: PairBatch, alive: np.ndarray) -> list[Measure]:  # noqa: ARG002
        """Return 1 if only case, white space, or punctuation differs, else 0."""
        sides = [
            [
                _NOT_A_WORD.sub("", action.view("action")).casefold()
                for action in batch.actions[side]
            ]
            for side in SIDES
        ]
        same = np.array([a == b for a, b in zip(*sides, strict=True)], float)
        return [Measure(field="pair", metric="is_degenerate", values=same, maximum=0)]


_NOT_A_WORD = re.compile(r"[\W_]+")


@OPERATORS.register_module("pair_secret_filter")
class PairSecretFilter(PairFilter):
    """Keeps a pair if its prompt, sides, and hint contain no secret."""

    _FIELDS = (
        ("prompt", PROMPT),
        ("chosen", "chosen_action_json"),
        ("rejected", "rejected_action_json"),
        ("chosen", "chosen"),
        ("rejected", "rejected"),
        ("hint", "hint"),
    )

    def measure(self, batch: PairBatch, alive: np.ndarray) -> list[Measure]:
        """Return the kinds of secrets by field. The states of a session share messages, so each message is scanned once."""
        notes: dict[str, list[list[str]]] = {
            field: [[] for _ in range(len(batch))] for field, _ in self._FIELDS
        }
        for field, column in self._FIELDS:
            for row, value in enumerate(batch.values(column)):
                if value and alive[row]:
                    for text in string_leaves(value):
                        notes[field][row] += _secret_kinds(text)
        return [
            Measure(
                field=field,
                metric="n_secrets",
                values=np.array([len(kinds) for kinds in found], float),
                maximum=0,
                notes=[", ".join(sorted(set(kinds))) for kinds in found],
            )
            for field, found in notes.items()
        ]


def _secret_kinds(text: str) -> tuple[str, ...]:
    digest = xxhash.xxh3_128_digest(text.encode("utf-8", "replace"))
    if digest not in _KNOWN_TEXTS:
        if len(_KNOWN_TEXTS) >= _MAX_KNOWN_TEXTS:
            _KNOWN_TEXTS.clear()
        _KNOWN_TEXTS[digest] = tuple(hit.kind for hit in find_secrets(text))
    return _KNOWN_TEXTS[digest]


_KNOWN_TEXTS: dict[bytes, tuple[str, ...]] = {}
_MAX_KNOWN_TEXTS = 1 << 18


@OPERATORS.register_module("pair_feasibility_filter")
class PairFeasibilityFilter(PairFilter):
    """Keeps a pair if its chosen side is possible at the prompt, not done yet, and asked for."""

    def measure(self, batch: PairBatch, alive: np.ndarray) -> list[Measure]:
        """Return 1 and the reason if the chosen side can't work, else 0."""
        notes = [""] * len(batch)
        prompts, folders = batch.values(PROMPT), batch.values("cwd")
        for row in np.flatnonzero(alive).tolist():
            chosen, rejected = (_whole_action(batch, side, row) for side in SIDES)
            if chosen.is_valid:
                prompt = json_value(prompts[row] or "[]")
                found = PromptState(prompt, rejected, cwd=folders[row]).obstacle(chosen)
                notes[row] = f"{found.kind}: {found.why}" if found else ""
        values = np.array([bool(note) for note in notes], float)
        field = "chosen"
        return [Measure(field=field, metric="obstacle", values=values, maximum=0, notes=notes)]


def _whole_action(batch: PairBatch, side: str, row: int) -> Action:
    message = batch.values(f"{side}_action_json")[row]
    cwd = batch.values("cwd")[row]
    return canonical_action(json_value(message) if message else batch.values(side)[row], cwd=cwd)


@OPERATORS.register_module("pair_each_side_filter")
class PairEachSideFilter(PairFilter):
    """Keeps a pair if both sides pass a filter of data-juicer."""

    def __init__(
        self,
        operator: str = "",
        arguments: dict | str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Initialization method.

        :param operator: name of a filter of data-juicer that reads a text.
        :param arguments: its parameters; as JSON text where a recipe uses this operator twice,
            since data-juicer's own command merges those of both uses.

        Raises:
            ValueError: no operator is named.
        """
        super().__init__(*args, **kwargs)
        self._judged_by, self._arguments = operator, inner_arguments(arguments)
        if not operator:
            raise ValueError(
                "operator is missing: name the filter of data-juicer that judges the sides"
            )
        self._filter: Any = load_ops([{operator: dict(self._arguments)}])[0]

    def judge(self, batch: PairBatch, alive: np.ndarray) -> RowVerdict:
        """Judge by the filter's own statistics, which start empty for each side."""
        found: dict[str, tuple[list[bool], list[dict[str, Any]]]] = {}
        rows = np.flatnonzero(alive)
        for side in SIDES:
            texts = batch.view(side, self.view).to_pylist()
            columns = {self._filter.text_key: [texts[row] or "" for row in rows.tolist()]}
            found[side] = filter_rows(self._filter, columns) if len(rows) else ([], [])
        measures = [
            Measure(field=side, metric=self.metric(name), values=self._every(stats, name, alive))
            for side, (_, stats) in found.items()
            for name in sorted(stats[0] if stats else ())
            if isinstance(stats[0][name], int | float)
        ]
        verdict = RowVerdict.of(len(batch), measures)
        # In one order: executors sort what they are given.
        limits = ", ".join(f"{name}={self._arguments[name]}" for name in sorted(self._arguments))
        for side, (kept, stats) in found.items():
            for row, is_kept, stat in zip(rows.tolist(), kept, stats, strict=True):
                if not is_kept and not verdict.fails[row]:
                    value = ", ".join(f"{name}={stat[name]}" for name in sorted(stat))
                    verdict.fail([row], side, value, f"{self._judged_by}: {limits}")
        return verdict

    def _every(self, stats: list[dict[str, Any]], name: str, alive: np.ndarray) -> np.ndarray:
        values = np.zeros(len(alive))
        values[alive] = [stat[name] for stat in stats]
        return values


@OPERATORS.register_module("pair_each_side_mapper")
class PairEachSideMapper(Mapper):
    """Edits the texts of both sides by a mapper of data-juicer. Calls don't change."""

    _batched_op = True

    def __init__(
        self,
        operator: str = "",
        arguments: dict | str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Initialization method.

        :param operator: name of a mapper of data-juicer that edits a text.
        :param arguments: its parameters; as JSON text where a recipe uses this operator twice,
            since data-juicer's own command merges those of both uses.

        Raises:
            ValueError: no operator is named.
        """
        super().__init__(*args, **kwargs)
        if not operator:
            raise ValueError(
                "operator is missing: name the mapper of data-juicer that edits the sides"
            )
        self._mapper: Any = load_ops([{operator: inner_arguments(arguments)}])[0]

    def process_batched(self, samples: dict[str, Any]) -> dict[str, Any]:
        """Edit the sides that are texts, both in the column and in the published message."""
        for side in SIDES:
            texts, messages = list(samples[side]), list(samples[f"{side}_action_json"])
            rows = [
                row
                for row, message in enumerate(messages)
                if texts[row] is not None and not (message and read_side(message).calls)
            ]
            if not rows:
                continue
            given = {self._mapper.text_key: [texts[row] for row in rows]}
            edited = map_rows(self._mapper, given)[self._mapper.text_key]
            for row, text in zip(rows, edited, strict=True):
                if text != texts[row] and messages[row]:
                    messages[row] = text_message(text)
                texts[row] = text
            samples = {**samples, side: texts, f"{side}_action_json": messages}
        return samples
