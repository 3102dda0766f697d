"""Fit a conversation into a token budget.

A prompt that fits isn't changed. Otherwise it is cut in this order: If tool definitions and the
system message take more than half of the budget, the definitions lose their descriptions, and then
the system message is shortened. Long texts of steps lose their middle, down to a sixteenth of the
budget. Whole steps are removed, the oldest first. A mark replaces each removed part.

Parts that the sides of a pair need always stay: the text that an edit replaces, the file that a
call names, the last request, and the newest step. If these don't fit, the prompt is refused with
the reason.

Limits move in coarse steps, so that the states of one session get the same cuts and share their
beginning.
"""

import json
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from trainer.data.template import LEFT_OUT, with_object_arguments
from trainer.data.types import Message, Tool

FILES = ("file_path", "path", "notebook_path", "filePath", "target_file")
"""Arguments that name a file."""
REPLACED = ("old_string", "old_str", "oldString")
"""Arguments whose text must be in a file."""

_STEPS = 17
_LADDER = [0.84**k for k in range(_STEPS)]
"""Longest text as a share of the budget; the last is about a sixteenth."""
_TIGHT = [*_LADDER, *(_LADDER[-1] * 0.7**k for k in range(1, 12))]
"""The same for what must stay, where nothing else is left."""
_MARK_TOKENS = 10
"""Tokens of `[123 characters left out]`, roughly: the whole is counted after it was rendered."""
_COARSE = 5
"""Steps are left out by so many parts of the budget at a time."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The tokens that a budget removed from a prompt or a response."""

    n_dropped_steps: int = 0
    n_shortened_texts: int = 0
    n_smaller_tools: int = 0
    """Number of tools whose definitions were shortened or removed."""
    n_dropped_tokens: int = 0
    """Number of tokens cut from the end of a response, or from the beginning of a prompt."""
    refusal: str | None = None
    """Why the prompt was refused."""

    def __bool__(self) -> bool:
        """Return whether anything was taken."""
        return any(asdict(self).values())

    def __str__(self) -> str:
        """Name what was taken, in words."""
        if self.refusal:
            return self.refusal
        counted = {
            "older steps left out": self.n_dropped_steps,
            "long texts shortened": self.n_shortened_texts,
            "tools described shorter": self.n_smaller_tools,
            "tokens cut off": self.n_dropped_tokens,
        }
        return ", ".join(f"{n} {what}" for what, n in counted.items() if n) or "nothing"


class Fitted(NamedTuple):
    """The rendered part of a conversation."""

    messages: list[Message]
    tools: list[Tool] | None
    cut: Cut
    n_estimated: int
    """Estimated tokens, as the sum of the parts."""


_Frame = tuple[list[Message], list[Tool] | None, int, int]
"""System message, tools, how many of these are described shorter, and how many texts are shortened."""


def sides_of(row: Mapping[str, Any]) -> list[Message]:
    """List the actions at a row's state: both sides, the consensus, or the field `sides`."""
    if "sides" in row:
        return list(row["sides"])
    found: list[Message] = []
    for name in ("chosen", "rejected", "completion", "consensus", "action"):
        side: Any = row.get(name)
        found += [dict(side)] if isinstance(side, Mapping) else side or []
    return found


def needs_of(sides: Iterable[Message]) -> dict[str, list[str]]:
    """Return the texts and tools that a prompt must keep so that these actions are possible."""
    texts: set[str] = set()
    tools: set[str] = set()
    for message in sides:
        for call in message.get("tool_calls") or ():
            function = with_object_arguments(call["function"])
            tools.add(str(function["name"]))
            texts.update(_named(function["arguments"]))
    return {"texts": sorted(text for text in texts if text.strip()), "tools": sorted(tools)}


def _named(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, entry in value.items():
            if name in (*FILES, *REPLACED) and isinstance(entry, str):
                yield entry
            else:
                yield from _named(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _named(entry)


def span_of(text: str, needed: str) -> tuple[int, int] | None:
    """Find a needed text in another, either exactly or line by line after line numbers."""
    if (start := text.rfind(needed)) >= 0:
        return start, start + len(needed)
    lines = [line.strip() for line in needed.splitlines() if line.strip()]
    if len(lines) < 2:
        return None
    start = text.find(lines[0])
    while start >= 0:
        end = start
        for line in lines:
            at = text.find(line, end)
            if at < 0:
                return None
            end = at + len(line)
        if end - start <= 2 * len(needed) + 20 * len(lines):
            return start, end
        start = text.find(lines[0], start + 1)
    return None


def _parts_of(needed: str) -> list[str]:
    """Name the parts of what is nowhere as a whole: its lines, or the name of a file without its folders."""
    lines = [line.strip() for line in needed.splitlines() if line.strip()]
    if len(lines) > 1:
        return lines
    name = needed.replace("\\", "/").rpartition("/")[2]
    return [name] if name and name != needed else []


def _replaced_in(value: Any) -> Iterator[str]:
    """List the texts that the calls of messages replace."""
    if isinstance(value, Mapping):
        yield from (value[name] for name in REPLACED if isinstance(value.get(name), str))
        value = list(value.values())
    if isinstance(value, list):
        for entry in value:
            yield from _replaced_in(entry)


def _texts(value: Any, but: Collection[str] = ()) -> Iterator[str]:
    """List the texts of a message: its content, and the arguments of its calls, `but` of those with such a name."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        if any(name in value for name in but):
            return
        for entry in value.values():
            yield from _texts(entry, but)
    elif isinstance(value, list):
        for entry in value:
            yield from _texts(entry, but)


@dataclass(frozen=True)
class _LongText:
    """One long text: how many tokens it has, and which characters must stay."""

    text: str
    n_tokens: int
    spans: list[tuple[int, int]]

    def kept(self, cap: int) -> int:
        """Count the tokens that stay under a cap, mark included."""
        n_chars = sum(end - start for start, end in self.spans)
        n_needed = -(-self.n_tokens * n_chars // max(len(self.text), 1))
        n_kept = max(cap, n_needed) + _MARK_TOKENS * (1 + len(self.spans))
        return min(n_kept, self.n_tokens)

    def shortened(self, cap: int) -> str:
        """Leave out what is in the middle and not needed."""
        if self.kept(cap) >= self.n_tokens:
            return self.text
        n_needed = sum(end - start for start, end in self.spans)
        half = max(len(self.text) * cap // self.n_tokens - n_needed, 0) // 2
        ends = [(0, half), (len(self.text) - half, len(self.text))]
        pieces, at = [""], 0
        for start, end in sorted([*self.spans, *ends]):
            if start > at:
                pieces[-1] += f"\n[{start - at} characters left out]\n"
            pieces.append(self.text[max(start, at) : end])
            at = max(at, end)
        return "".join(pieces).strip("\n")


class Fitting:
    """One conversation and the parts that may be cut."""

    def __init__(
        self,
        system: Sequence[Message],
        blocks: Sequence[list[Message]],
        tools: Sequence[Tool] | None,
        needs: Mapping[str, Sequence[str]],
        measures: Any,
    ) -> None:
        self.system, self.blocks = list(system), list(blocks)
        self.tools = list(tools) if tools else None
        self.needs, self.measures = needs, measures
        self.sizes = [measures.block_size(block) for block in self.blocks]
        self._spans: dict[str, list[tuple[int, int]]] = {}
        self.pinned = self._pinned()

    @cached_property
    def whole_size(self) -> int:
        """Return the sum of the tokens of all parts."""
        return sum(self.sizes) + self.measures.fixed_size(self.system, self.tools)

    def _pinned(self) -> set[int]:
        """Find the newest step, the last request, and where needed texts stood last."""
        pinned = {len(self.blocks) - 1} if self.blocks else set()
        requests = (i for i, block in enumerate(self.blocks) if block[0]["role"] == "user")
        pinned.update(list(requests)[-1:])
        for needed in self.needs.get("texts", ()):
            # An edit that replaced a text shows it last of all: kept alone, nothing would seem to be left.
            for but, parts in ((REPLACED, [needed]), (REPLACED, _parts_of(needed)), ((), [needed])):
                places = [self._places_of(part, but) for part in parts]
                if places and None not in places:
                    break
            if None in places:
                places = [self._places_of(part) for part in _parts_of(needed)]
            found = set().union(*(part or set() for part in places))
            if not but:
                found |= self._since_replaced(found, needed)
            pinned |= found
        return pinned

    def _since_replaced(self, places: Collection[int], needed: str) -> set[int]:
        """Name all blocks since an edit that replaced a needed text, where only that edit shows it.

        The text stands again, or the side could not replace it: what came since says so.
        """
        parts = [needed, *_parts_of(needed)]
        for place in sorted(places):
            old = "\n".join(_replaced_in(self.blocks[place]))
            if any(part in old for part in parts):
                return set(range(place, len(self.blocks)))
        return set()

    def _places_of(self, needed: str, but: Sequence[str] = ()) -> set[int] | None:
        """Find the block where a text stood last, and keep its span; `None` if it stood nowhere."""
        for place in [*reversed(range(len(self.blocks))), -1]:
            block = self.blocks[place] if place >= 0 else self.system
            found = [(text, at) for text in _texts(block, but) if (at := span_of(text, needed))]
            if found:
                self._spans.setdefault(found[-1][0], []).append(found[-1][1])
                return {place} - {-1}
        return None

    def refusal(self, whole: int) -> Cut:
        """Return why the prompt is refused."""
        why = "the last request, the newest step and what the sides name take more than"
        return Cut(refusal=f"{why} {whole} tokens")

    def within(self, budget: int, *, whole: int) -> Fitted | None:
        """Cut to the budget, and drop the tools if necessary. Return None if that isn't enough.

        Args:
            budget: tokens, as the sum of the parts.
            whole: tokens of the whole budget. Limits are fractions of it.
        """
        room = max(whole // 2, budget - sum(self.sizes))
        least = budget - self._size(sorted(self.pinned), 1, 1)
        for tools, share in ((self.tools, room), (self.tools, least), (None, least)):
            fitted = self._steps_within(self._smaller_frame(tools, share, whole), budget, whole)
            if fitted is not None:
                return fitted
        return None

    def _steps_within(self, frame: "_Frame", budget: int, whole: int) -> Fitted | None:
        system, tools, n_smaller, n_short = frame
        fixed = self.measures.fixed_size(system, tools)
        left = budget - fixed
        kept, caps = list(range(len(self.blocks))), _LADDER
        cap = self._cap(kept, left, caps, whole)
        if cap is None:
            recent = self._recent(left, whole)
            kept, caps = (sorted(self.pinned), _TIGHT) if recent is None else (recent, _LADDER)
            cap = self._cap(kept, left, caps, whole)
        if cap is None:
            return None
        messages, n_shortened = self._built(kept, cap, whole)
        cut = Cut(
            n_dropped_steps=len(self.blocks) - len(kept),
            n_shortened_texts=n_shortened + n_short,
            n_smaller_tools=n_smaller,
        )
        n_estimated = fixed + self._size(kept, cap, self._newest_cap(cap, whole))
        return Fitted([*system, *messages], tools, cut, n_estimated)

    # -- the frame: system message and tools ----------------------------------------------------

    def _smaller_frame(self, tools: list[Tool] | None, room: int, whole: int) -> "_Frame":
        system, n_smaller = self.system, 0 if tools else len(self.tools or ())
        size = self.measures.fixed_size(system, tools)
        for n_tool, n_argument in _PROSE if tools else ():
            if size <= room:
                break
            tools = _described_tools(self.tools or (), n_tool, n_argument)
            n_smaller = len(tools)
            size = self.measures.fixed_size(system, tools)
        if tools and size > room:
            per_token = size - self.measures.fixed_size(system, None)
            per_token /= sum(self.measures.text_size(json.dumps(tool)) for tool in tools)
            tools = self._fewer_tools(tools, (size - room) / per_token) or None
            size = self.measures.fixed_size(system, tools)
        if size <= room or not system:
            return system, tools, n_smaller, 0
        content = system[0]["content"]
        text = _LongText(content, self.measures.text_size(content), self._spans.get(content, []))
        cap = text.n_tokens
        while size > room and cap > whole // 16:
            cap = max(cap - (size - room) - _MARK_TOKENS, whole // 16)
            system = [{**self.system[0], "content": text.shortened(cap)}]
            size = self.measures.fixed_size(system, tools)
        return system, tools, n_smaller, int(system[0]["content"] != content)

    def _fewer_tools(self, tools: Sequence[Tool], excess: float) -> list[Tool]:
        """Leave out the last of the tools that no side calls."""
        needed, kept = self.needs.get("tools", ()), list(tools)
        for tool in reversed(tools):
            if excess > 0 and tool["function"].get("name") not in needed:
                kept.remove(tool)
                excess -= self.measures.text_size(json.dumps(tool))
        return kept

    # -- steps ----------------------------------------------------------------------------------

    @cached_property
    def _long(self) -> list[list[_LongText]]:
        """By block its texts, with their tokens."""
        return [
            [
                _LongText(text, self.measures.text_size(text), sorted(self._spans.get(text, [])))
                for text in _texts(block)
                if len(text) > 4 * _MARK_TOKENS
            ]
            for block in self.blocks
        ]

    def _newest_cap(self, cap: int, whole: int) -> int:
        return max(cap, whole // 4) if cap >= int(whole * _LADDER[-1]) else cap

    @cached_property
    def _stretch(self) -> list[float]:
        """By block, tokens in the prompt for one of its texts: a template may escape them."""
        count = self.measures.text_size
        sums = [sum(map(count, _texts(block))) for block in self.blocks]
        return [min(max(n / max(s, 1), 1.0), 4.0) for n, s in zip(self.sizes, sums, strict=True)]

    def _block_size(self, place: int, cap: int) -> int:
        gone = sum(text.n_tokens - text.kept(cap) for text in self._long[place])
        return self.sizes[place] - int(gone * self._stretch[place])

    def _size(self, kept: Sequence[int], cap: int, newest_cap: int) -> int:
        last = len(self.blocks) - 1
        sizes = [self._block_size(i, newest_cap if i == last else cap) for i in kept]
        return sum(sizes) + self._n_gaps(kept) * self._mark_size

    @cached_property
    def _mark_size(self) -> int:
        return self.measures.block_size([_mark()])

    def _n_gaps(self, kept: Sequence[int]) -> int:
        return sum(after > before + 1 for before, after in pairwise([-1, *kept]))

    def _cap(
        self, kept: Sequence[int], left: int, ladder: Sequence[float], whole: int
    ) -> int | None:
        """Return the longest text with which these blocks fit; `None` where none is short enough."""
        caps = [max(int(whole * share), 1) for share in ladder]

        def fits(k: int) -> bool:
            return self._size(kept, caps[k], self._newest_cap(caps[k], whole)) <= left

        k = bisect_left(range(len(caps)), 1, key=lambda k: int(fits(k)))
        return caps[k] if k < len(caps) else None

    def _recent(self, left: int, whole: int) -> list[int] | None:
        """Leave out the oldest steps; `None` where what must stay does not fit either."""
        cap = max(int(whole * _LADDER[-1]), 1)
        newest = self._newest_cap(cap, whole)
        kept = list(range(len(self.blocks)))
        step = max(whole // _COARSE, 1)
        to_drop = -(-(self._size(kept, cap, newest) - left) // step) * step
        dropped: set[int] = set()
        for place in kept:
            is_enough = (
                to_drop <= 0
                and self._size([i for i in kept if i not in dropped], cap, newest) <= left
            )
            if is_enough:
                break
            if place not in self.pinned:
                dropped.add(place)
                to_drop -= self._block_size(place, cap)
        kept = [i for i in kept if i not in dropped]
        return kept if self._size(kept, cap, newest) <= left else None

    def _built(self, kept: Sequence[int], cap: int, whole: int) -> tuple[list[Message], int]:
        built: list[Message] = []
        n_shortened, last = 0, len(self.blocks) - 1
        for before, place in pairwise([-1, *kept]):
            if place > before + 1:
                built.append(_mark())
            limit = self._newest_cap(cap, whole) if place == last else cap
            short = {text.text: text.shortened(limit) for text in self._long[place]}
            n_shortened += sum(text != other for text, other in short.items())
            built += [_replaced(message, short) for message in self.blocks[place]]
        return built, n_shortened


def _mark() -> Message:
    return {"role": "user", "content": LEFT_OUT}


def _replaced(value: Any, texts: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return texts.get(value, value)
    if isinstance(value, Mapping):
        return {key: _replaced(entry, texts) for key, entry in value.items()}
    if isinstance(value, list):
        return [_replaced(entry, texts) for entry in value]
    return value


_PROSE = ((1600, 400), (1000, 200), (600, 120), (300, 60), (160, 0), (0, 0))
"""Longest description of a tool and of an argument, in characters, step by step."""


def _described_tools(tools: Sequence[Tool], n_tool: int, n_argument: int) -> list[Tool]:
    """Describe tools and their arguments in no more than so many characters each."""
    described = []
    for tool in tools:
        function = dict(tool["function"])
        if "description" in function:
            function["description"] = str(function["description"] or "").strip()[:n_tool]
        if "parameters" in function:
            function["parameters"] = _described(function["parameters"], n_argument)
        described.append({**tool, "function": function})
    return described


_SCHEMA = ("type", "properties", "required", "enum", "items", "anyOf", "oneOf", "$ref", "$defs")


def _described(schema: Any, n_chars: int) -> Any:
    """Cut the prose of a JSON schema; with none left, all that is not structure goes with it."""
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for key, entry in schema.items():
        if key in ("properties", "$defs") and isinstance(entry, Mapping):
            kept[key] = {name: _described(one, n_chars) for name, one in entry.items()}
        elif key == "description":
            kept |= {key: str(entry)[:n_chars]} if n_chars else {}
        elif n_chars or key in _SCHEMA:
            kept[key] = _described(entry, n_chars)
    return kept
