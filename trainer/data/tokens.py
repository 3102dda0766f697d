"""Store the token ids of a run's texts, rendered once, in memory-mapped files.

A chat template takes a third of a CPU second for a session of 9,000 tokens, each time that a pair
is drawn. `TokenStore` renders all texts before the first step, in one process per core. Afterwards,
ids are looked up by a hash of the request. A later run renders only what is new to it.
"""

import hashlib
import json
import logging
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from trainer.data.budget import Cut, needs_of, sides_of
from trainer.data.hints import HintFunction
from trainer.data.types import Message, Tool

if TYPE_CHECKING:
    from trainer.data.dataset import PreferenceData  # reads what `rendering` makes

logger = logging.getLogger(__name__)

_SCHEMA = pa.schema([("key", pa.string()), ("ids", pa.list_(pa.int32())), ("cut", pa.string())])
_WORTH_PROCESSES = 20_000_000
"""Characters from which more processes are worth their start, some seconds each."""
_PER_BATCH = 16

Request = dict[str, Any]
"""A prompt (`messages`, `tools`, `hint`, `needs`) or a response (`messages`, `n_calls_before`)."""


def prompt_request(
    messages: Sequence[Message],
    tools: Sequence[Tool] | str | None,
    hint: str | None,
    sides: Iterable[Message] = (),
) -> Request:
    """Return the request of a prompt, which must keep what the actions in `sides` need."""
    if isinstance(tools, str):  # as a column of JSON text has it
        tools = json.loads(tools)
    return {"messages": messages, "tools": tools, "hint": hint, "needs": needs_of(sides)}


def response_request(messages: Sequence[Message], after: Sequence[Message] = ()) -> Request:
    """Return the request of a response to the prompt `after`."""
    n_before = sum(len(message.get("tool_calls") or ()) for message in after)
    return {"messages": messages, "n_calls_before": n_before}


def requests_of(
    data: "PreferenceData", hint: HintFunction, *, with_tools: bool
) -> Iterator[Request]:
    """List the requests that a run on this data renders more than once."""
    held_out: list[Mapping[str, Any]] = [*data.test_pairs, *data.test_prompts]
    for row in [*data.training_rows, *held_out]:
        tools = row.get("tools") if with_tools else None
        yield prompt_request(row["prompt"], tools, None, sides_of(row))
        yield from (
            response_request(row[side], row["prompt"])
            for side in ("chosen", "rejected")
            if side in row
        )
    for row in data.training_rows:
        if found := hint(row):
            tools = row.get("tools") if with_tools else None
            yield prompt_request(row["prompt"], tools, found, sides_of(row))


class TokenStore:
    """The stored ids of requests. The caller renders missing requests."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._table = _SCHEMA.empty_table()

    def get(self, request: Request) -> tuple[list[int], Cut] | None:
        """Return the ids of a request and the cuts of its budget, or `None` if it is unknown."""
        if not self._places:
            return None
        place = self._places.get(key_of(request))
        if place is None:
            return None
        # A slice of one row is read out of the mapped file; the column is never made a list.
        cut = self._table["cut"][place].as_py()
        return self._table["ids"][place].as_py(), Cut(**json.loads(cut)) if cut else Cut()

    def fill(self, requests: Iterable[Request], renderer: Any, folder: Path) -> None:
        """Render requests into a file in `folder`, but for those that are in an earlier file.

        The names of files begin with a hash of the tokenizer, its template, and the budgets. A run
        that is stopped here keeps what it has rendered.
        """
        wanted = {key_of(request): request for request in requests}
        earlier = sorted(folder.glob(f"{renderer.identity[:32]}-*.arrow"))
        self._read(earlier)
        missing = [(key, request) for key, request in wanted.items() if key not in self._places]
        if not missing:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{renderer.identity[:32]}-{len(earlier):04}.arrow"
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            with pa.OSFile(str(part), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:
                for rows in _rendered(missing, renderer):
                    writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=_SCHEMA))
        finally:
            part.replace(path)
        self._read([*earlier, path])

    def _read(self, paths: Sequence[Path]) -> None:
        tables = [pa.ipc.open_file(pa.memory_map(str(path))).read_all() for path in paths]
        self._table = pa.concat_tables(tables or [_SCHEMA.empty_table()])
        self._places = {key: place for place, key in enumerate(self._table["key"].to_pylist())}


def key_of(request: Request) -> str:
    """Return the hash of a request's contents."""
    text = json.dumps(request, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _rendered(requests: list[tuple[str, Request]], renderer: Any) -> Iterator[list[dict[str, Any]]]:
    batches = [requests[i : i + _PER_BATCH] for i in range(0, len(requests), _PER_BATCH)]
    n_chars = sum(
        len(str(message.get("content") or ""))
        for _, request in requests
        for message in request["messages"]
    )
    n_processes = min(len(os.sched_getaffinity(0)), len(batches))
    if n_chars < _WORTH_PROCESSES or n_processes < 2:
        yield from (_render(renderer, batch) for batch in batches)
        return
    logger.info("tokenizing %d texts in %d processes", len(requests), n_processes)
    # Not forked: this process has the threads of torch. Nor a `Pool`, which waits for ever for the
    # batch of a process that was killed.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(n_processes, context, _take, (renderer,)) as pool:
        try:
            yield from pool.map(_render_here, batches)
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()  # or the pool would wait for all batches
            raise


def _render(renderer: Any, batch: list[tuple[str, Request]]) -> list[dict[str, Any]]:
    rows = []
    for key, request in batch:
        ids, cut = renderer.render(request)
        rows.append({"key": key, "ids": ids, "cut": json.dumps(asdict(cut)) if cut else ""})
    return rows


_HERE: list[Any] = []


def _take(renderer: Any) -> None:
    _HERE[:] = [renderer]


def _render_here(batch: list[tuple[str, Request]]) -> list[dict[str, Any]]:
    return _render(_HERE[0], batch)
