"""The dataset's columns, configs and paths: what a row of each config looks like.

Messages and tools are lists of JSON texts in the files and are declared as `List(Json())` in the
card, so that `datasets` gives back the very same messages, whatever tools a batch has. A config
has one form of a side only, messages: TRL decides by a single column whether a dataset is
conversational.
"""

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from replay_pipeline.storage.pair_rows import ROWS_AT_ONCE, json_value

_MESSAGES = pa.list_(pa.string())
_JSON = {b"is_json": b"1"}


def _json(name: str, kind: pa.DataType = _MESSAGES) -> pa.Field:
    return pa.field(name, kind, metadata=_JSON)


_COMMON = [
    ("hint", pa.string()),
    ("agreement_level", pa.string()),
    ("n_teachers_agreeing", pa.int32()),
    ("n_teachers_asked", pa.int32()),
    ("teachers_agreeing", pa.list_(pa.string())),
    ("student_model", pa.string()),
    ("outcome", pa.string()),
    ("is_distillable", pa.bool_()),
    ("cost_usd", pa.float64()),
]
_KEYS = [("state_id", pa.string()), ("session_id", pa.string()), ("trace_batch", pa.string())]
_OF_PAIRS = [
    ("pair_id", pa.string()),
    ("n_teachers_valid", pa.int32()),
    ("n_against", pa.int32()),
    ("margin", pa.int32()),
    ("evidence", pa.list_(pa.string())),
    ("source", pa.string()),
    ("rejected_source", pa.string()),
    ("shares_vendor", pa.bool_()),
    ("weight", pa.float64()),
]

PAIRS = pa.schema(
    [_json("prompt"), _json("chosen"), _json("rejected"), _json("tools"), *_KEYS, *_COMMON]
    + _OF_PAIRS
)
POSITIVES = pa.schema(
    [_json("prompt"), _json("completion"), pa.field("label", pa.bool_()), _json("tools")]
    + [*_KEYS, *_COMMON]
)
PROMPTS = pa.schema(
    [_json("prompt"), _json("tools"), _json("consensus", pa.string())]
    + [("kind", pa.string()), *_KEYS, *_COMMON]
)
CONFIGS: dict[str, pa.Schema] = {
    "pairs": PAIRS,
    "positives": POSITIVES,
    "prompts": PROMPTS,
    "pairs_distillable": PAIRS,
}
"""Every config by name; the first is the default."""

DATA = "data"
MANIFESTS = "manifests"
CARD = "README.md"
FACTS = f"{MANIFESTS}/_card.json"

_ROW_GROUP_BYTES, _ROW_GROUP_ROWS = 8_000_000, 1_000
_encode = msgspec.json.Encoder().encode


def features_of(schema: pa.Schema) -> list[dict[str, Any]]:
    """Give the columns as `dataset_info` declares them in the card."""
    features: list[dict[str, Any]] = []
    for field in schema:
        is_list = pa.types.is_list(field.type)
        scalar = field.type.value_type if is_list else field.type
        kind = "json" if field.metadata else _KINDS[scalar]
        features.append({"name": field.name, ("list" if is_list else "dtype"): kind})
    return features


_KINDS = {
    pa.string(): "string",
    pa.bool_(): "bool",
    pa.int32(): "int32",
    pa.float64(): "float64",
}


def batch_dir(config: str, split: str, batch: str) -> str:
    """Give the folder that the shards of a batch own."""
    return f"{DATA}/{config}/{split}/trace_batch={batch}"


def manifest_path(batch: str) -> str:
    """Tell where the manifest of a batch lies."""
    return f"{MANIFESTS}/{batch}.json"


def batch_of(path: str) -> str | None:
    """Give the batch that owns a path of the dataset, if one does."""
    if match := re.fullmatch(rf"{DATA}/[^/]+/[^/]+/trace_batch=([^/]+)/[^/]+", path):
        return match[1]
    if match := re.fullmatch(rf"{MANIFESTS}/(?!_)([^/]+)\.json", path):
        return match[1]
    return None


def is_batch_key(batch: str) -> bool:
    """Whether a batch key can be a folder name on every file system and on the Hub."""
    return bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", batch))


class Shards:
    """The files of one config and split of a batch, written as rows come in.

    A file is named by its content; equal rows, in equal parts, give equal names and bytes.
    """

    def __init__(self, folder: Path, schema: pa.Schema, *, max_shard_bytes: int) -> None:
        self._folder, self._schema = folder, schema
        self._max_shard_bytes = max_shard_bytes
        self._waiting: list[pa.Table] = []
        self._writer: pq.ParquetWriter | None = None
        self._n_bytes = self._n_rows = 0
        self.files: dict[str, Path] = {}
        self.n_rows: dict[str, int] = {}
        """Rows by file."""

    def add(self, rows: pa.Table) -> None:
        """Take rows in; a row group is written when enough have come together."""
        if not len(rows):
            return
        self._waiting.append(rows)
        self._n_bytes += rows.nbytes
        self._n_rows += len(rows)
        if sum(part.nbytes for part in self._waiting) >= _ROW_GROUP_BYTES:
            self._write()
        if self._n_bytes >= self._max_shard_bytes:
            self.close()

    def _write(self) -> None:
        if self._writer is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(
                self._folder / "open",
                self._schema,
                compression="zstd",
                compression_level=6,
                write_page_index=True,
                use_content_defined_chunking=True,
            )
        rows = pa.concat_tables(self._waiting).combine_chunks()
        self._writer.write_table(rows, row_group_size=_ROW_GROUP_ROWS)
        self._waiting.clear()

    def close(self) -> None:
        """Finish the file at hand."""
        if self._waiting:
            self._write()
        if self._writer is None:
            return
        self._writer.close()
        with (self._folder / "open").open("rb") as file:
            name = f"{hashlib.file_digest(file, 'sha256').hexdigest()[:16]}.parquet"
        self.files[name] = (self._folder / "open").rename(self._folder / name)
        self.n_rows[name] = self._n_rows
        self._writer, self._n_bytes, self._n_rows = None, 0, 0


def read_shard(file: Path | bytes, config: str) -> Iterator[pa.Table]:
    """Give the rows of a file that `Shards` made, in parts."""
    schema = CONFIGS[config]
    with pq.ParquetFile(file if isinstance(file, Path) else io.BytesIO(file)) as shard:
        for part in shard.iter_batches(batch_size=ROWS_AT_ONCE):
            yield pa.table([part.column(name) for name in schema.names], schema=schema)


def pair_rows(kept: pa.Table, batch: str) -> pa.Table:
    """Give rows of the config `pairs`, from a table `normalized_pairs`."""
    return _table(
        kept,
        batch,
        PAIRS,
        prompt=_each(kept, "state_messages_json", messages_of),
        chosen=_each(kept, "chosen_messages_json", messages_of),
        rejected=_each(kept, "rejected_messages_json", messages_of),
        tools=_each(kept, "tools_json", tools_of),
    )


def positive_rows(positives: pa.Table, batch: str) -> pa.Table:
    """Give rows of the config `positives`: states at which the student did what the teachers would."""
    actions = _each(positives, "action_json", lambda text: messages_of(f"[{text}]"))
    texts = positives["action"].to_pylist()
    return _table(
        positives,
        batch,
        POSITIVES,
        prompt=_each(positives, "state_messages_json", messages_of),
        completion=[
            action or messages_of(json.dumps([{"role": "assistant", "content": text or ""}]))
            for action, text in zip(actions, texts, strict=True)
        ],
        label=[True] * len(positives),
        tools=_each(positives, "tools_json", tools_of),
    )


def prompt_rows(rows: pa.Table, side: str, kind: str) -> pa.Table:
    """Give rows of the config `prompts`: states with a consensus of teachers, which is on `side`.

    Args:
        rows: of the config `pairs` or `positives`.
        side: the column that holds the consensus.
        kind: what the column `kind` says.
    """
    if "source" in rows.column_names:
        by_consensus = [source in (None, "consensus") for source in rows["source"].to_pylist()]
        rows = rows.filter(pa.array(by_consensus, pa.bool_()))
    columns = {name: rows[name] for name in PROMPTS.names if name in rows.column_names}
    columns["consensus"] = pa.array([side[-1] for side in rows[side].to_pylist()], pa.string())
    columns["kind"] = pa.array([kind] * len(rows), pa.string())
    return pa.table([columns[name] for name in PROMPTS.names], schema=PROMPTS)


def _table(source: pa.Table, batch: str, schema: pa.Schema, **made: list[Any]) -> pa.Table:
    columns = []
    for field in schema:
        if field.name in made:
            columns.append(pa.array(made[field.name], field.type))
        elif field.name == "trace_batch":
            columns.append(pa.array([batch] * len(source), field.type))
        elif field.name in source.column_names:
            columns.append(source[field.name].cast(field.type))
        else:
            columns.append(pa.nulls(len(source), field.type))
    return pa.table(columns, schema=schema)


def _each(
    table: pa.Table, name: str, convert: Callable[[str], list[str] | None]
) -> list[list[str] | None]:
    return [None if text is None else convert(text) for text in table[name].to_pylist()]


def messages_of(messages_json: str) -> list[str]:
    """Messages as TRL and chat templates want them, each as JSON.

    Arguments of tool calls are objects, not text, and no content is null: templates put both into
    the prompt as they are.
    """
    return [_encode(_published(message)).decode() for message in json_value(messages_json)]


def _published(message: dict[str, Any]) -> dict[str, Any]:
    published = {key: value for key, value in message.items() if value is not None}
    published.setdefault("content", "")
    if calls := published.get("tool_calls"):
        published["tool_calls"] = [_published_call(call) for call in calls]
    return published


def _published_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json_value(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def tools_of(tools_json: str) -> list[str] | None:
    """Tools, each as JSON; `None` for a state without tools."""
    tools = json_value(tools_json)
    return [_encode(tool).decode() for tool in tools] or None
