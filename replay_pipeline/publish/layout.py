"""The layout of the dataset folder, and the columns of each config.

Messages are structs of text, which every parquet reader accepts: pandas, polars, duckdb, and each
version of `datasets`. Parts without a fixed shape stay JSON text: the arguments of a call, as in
OpenAI's form, and the list of tools. So a batch with new tools never conflicts with earlier
batches. A side is always a list of messages, because TRL decides by one column whether a dataset is
conversational.
"""

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import dropwhile
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from replay_pipeline.actions.native import NativeForm
from replay_pipeline.judge.feasibility import cwd_of
from replay_pipeline.storage.pair_rows import ROWS_AT_ONCE, json_value
from replay_pipeline.types import REHEARSAL, Message, conversation_of

VERSION = 6
"""Version of the columns. A dataset of another version is refused."""

_TEXT = pa.string()
_FUNCTION = pa.struct([("name", _TEXT), ("arguments", _TEXT)])
_CALL = pa.struct([("id", _TEXT), ("type", _TEXT), ("function", _FUNCTION)])
MESSAGE = pa.struct(
    [
        ("role", _TEXT),
        ("content", _TEXT),
        ("tool_calls", pa.list_(_CALL)),
        ("tool_call_id", _TEXT),
    ]
)
"""One message. Missing parts are null: its calls, or the id of the call that it answers."""
MESSAGES = pa.list_(MESSAGE)

_COMMON = [
    ("hint", pa.string()),
    ("agreement_level", pa.string()),
    ("n_teachers_agreeing", pa.int32()),
    ("n_teachers_asked", pa.int32()),
    ("teachers_agreeing", pa.list_(pa.string())),
    ("n_looks", pa.int32()),
    ("student_model", pa.string()),
    ("outcome", pa.string()),
    ("is_distillable", pa.bool_()),
    ("cost_usd", pa.float64()),
]
_KEYS = [
    (name, _TEXT)
    for name in ("state_id", "session_id", "conversation", "trace_batch", "cwd", "client_texts")
]
_OF_PAIRS = [
    ("pair_id", pa.string()),
    ("n_teachers_valid", pa.int32()),
    ("n_against", pa.int32()),
    ("margin", pa.int32()),
    ("evidence", pa.list_(pa.string())),
    ("source", pa.string()),
    ("rejected_source", pa.string()),
    ("shares_vendor", pa.bool_()),
    ("p_chosen_right", pa.float64()),
    ("p_rejected_wrong", pa.float64()),
    ("p_better", pa.float64()),
    ("difference", pa.list_(pa.string())),
    ("is_checked_right", pa.bool_()),
    ("chosen_trial", pa.string()),
    ("rejected_trial", pa.string()),
    ("weight", pa.float64()),
    ("n_tokens", pa.int32()),
    ("needs", pa.list_(pa.int32())),
]

PAIRS = pa.schema(
    [("prompt", MESSAGES), ("chosen", MESSAGES), ("rejected", MESSAGES), ("tools", _TEXT)]
    + [*_KEYS, *_COMMON, *_OF_PAIRS]
)
POSITIVES = pa.schema(
    [("prompt", MESSAGES), ("completion", MESSAGES), ("label", pa.bool_()), ("tools", _TEXT)]
    + [*_KEYS, *_COMMON, ("kind", _TEXT), ("p_chosen_right", pa.float64())]
)
PROMPTS = pa.schema(
    [("prompt", MESSAGES), ("tools", _TEXT), ("consensus", MESSAGE), ("kind", _TEXT)]
    + [*_KEYS, *_COMMON]
)
CONFIGS: dict[str, pa.Schema] = {
    "pairs": PAIRS,
    "positives": POSITIVES,
    "answers": POSITIVES,
    "prompts": PROMPTS,
    "pairs_distillable": PAIRS,
}
"""Every config by name. The first is the default. Configs with cut pairs are added to these."""


def config_of_length(n_tokens: int) -> str:
    """Return the name of the config with pairs cut to a length, such as `pairs_8k` for 8,192 tokens."""
    size = f"{n_tokens // 1024}k" if n_tokens % 1024 == 0 else str(n_tokens)
    return f"pairs_{size}"


def length_of(config: str) -> int | None:
    """Return the length in tokens to which a config is cut, or None."""
    match = re.fullmatch(r"pairs_(\d+)(k?)", config)
    return int(match[1]) * (1024 if match[2] else 1) if match else None


def schema_of(config: str) -> pa.Schema:
    """Return the columns of a config."""
    return PAIRS if length_of(config) else CONFIGS[config]


def configs_of(manifests: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the configs in which batches can have rows, the cut ones last."""
    more = {name for manifest in manifests for name in manifest["files"]} - CONFIGS.keys()
    return [*CONFIGS, *sorted(more, key=lambda name: length_of(name) or 0)]


CLIENT_TEXT = pa.schema(
    [("hash", _TEXT), ("n_replaced", pa.int32()), ("messages", MESSAGES), ("tools", _TEXT)]
)
"""The columns of a client's own texts, which replace the first `n_replaced` messages of the neutral prompt."""

DATA = "data"
CLIENT_TEXTS = "client_texts"
MANIFESTS = "manifests"
CARD = "README.md"
FACTS = f"{MANIFESTS}/_card.json"

_ROW_GROUP_BYTES, _ROW_GROUP_ROWS = 8_000_000, 1_000
MAX_SHARD_BYTES = 256_000_000
"""Arrow bytes of one shard, before compression."""
_encode = msgspec.json.Encoder().encode


def features_of(schema: Iterable[pa.Field]) -> list[dict[str, Any]]:
    """Return the columns in the form of `dataset_info` in the card."""
    return [{"name": field.name, **_declared(field.type)} for field in schema]


def _declared(kind: pa.DataType) -> dict[str, Any]:
    if pa.types.is_list(kind):
        inner = _declared(kind.value_type)
        return {"list": inner.get("struct") or inner["dtype"]}
    if pa.types.is_struct(kind):
        return {"struct": [{"name": field.name, **_declared(field.type)} for field in kind]}
    return {"dtype": _KINDS[kind]}


_KINDS = {
    pa.string(): "string",
    pa.bool_(): "bool",
    pa.int32(): "int32",
    pa.float64(): "float64",
}


def batch_dir(config: str, split: str, batch: str) -> str:
    """Return the folder of a batch's shards."""
    return f"{DATA}/{config}/{split}/{batch}"


def manifest_path(batch: str) -> str:
    """Return the path of a batch's manifest."""
    return f"{MANIFESTS}/{batch}.json"


def batch_of(path: str) -> str | None:
    """Return the batch that owns a path of the dataset, if any."""
    if match := re.fullmatch(rf"{DATA}/[^/]+/[^/]+/([^/]+)/[^/]+", path):
        return match[1]
    if match := re.fullmatch(rf"{CLIENT_TEXTS}/([^/]+)/[^/]+", path):
        return match[1]
    if match := re.fullmatch(rf"{MANIFESTS}/(?!_)([^/]+)\.json", path):
        return match[1]
    return None


def is_batch_key(batch: str) -> bool:
    """Return whether a batch key is valid as a folder name on every file system and on the Hub."""
    return bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", batch))


class Shards:
    """The files of a batch in one config and split, written as rows arrive.

    The name of a file is a hash of its content. Equal rows in equal parts give equal names and
    bytes.
    """

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        self._folder, self._schema = folder, schema
        self._waiting: list[pa.Table] = []
        self._writer: pq.ParquetWriter | None = None
        self._n_bytes = self._n_rows = 0
        self.files: dict[str, Path] = {}
        self.n_rows: dict[str, int] = {}
        """Rows by file."""

    def add(self, rows: pa.Table) -> None:
        """Add rows. A row group is written when there are enough."""
        if not len(rows):
            return
        self._waiting.append(rows)
        self._n_bytes += rows.nbytes
        self._n_rows += len(rows)
        if sum(part.nbytes for part in self._waiting) >= _ROW_GROUP_BYTES:
            self._write()
        if self._n_bytes >= MAX_SHARD_BYTES:
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
        """Finish the current file."""
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
    """Yield the rows of a file in parts."""
    with pq.ParquetFile(file if isinstance(file, Path) else io.BytesIO(file)) as shard:
        for part in shard.iter_batches(batch_size=ROWS_AT_ONCE):
            yield _table(pa.Table.from_batches([part]), schema_of(config))


def conversations_in(rows: pa.Table | pa.RecordBatch) -> list[str]:
    """Return the conversation of each row. A row without a session counts as its own."""
    states, sessions = rows["state_id"].to_pylist(), rows["session_id"].to_pylist()
    known = zip(states, sessions, _given(rows, "conversation"), strict=True)
    return [
        conversation or (conversation_of(session) if session else state)
        for state, session, conversation in known
    ]


Keep = Callable[[Mapping[str, Any]], str]
"""A function that stores the texts of a client and returns their hash."""


def _texts_of(part: pa.Table) -> list[dict[str, Any] | None]:
    """Return the texts of clients of each row, as they are published."""
    given = [text and json_value(text) for text in _given(part, "client_texts_json")]
    return [
        each
        and {
            "n_replaced": each["n_replaced"],
            "messages": published_messages(json.dumps(each["messages"])),
            "tools": published_tools(json.dumps(each["tools"])),
        }
        for each in given
    ]


def pair_rows(kept: pa.Table, batch: str, keep: Keep | None = None) -> pa.Table:
    """Return rows of the config `pairs`, from a table `normalized_pairs`.

    `keep` stores each client's own system text and tools in a separate file.
    """
    sides = {
        side: _each(kept, f"{side}_messages_json", published_messages)
        for side in ("chosen", "rejected")
    }
    return _rows(kept, batch, PAIRS, sides, keep)


UNCONFIRMED = ("answer", "continuation")
"""Kinds of actions that one teacher alone stands for: they are in `answers`."""


def by_config(positives: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """Yield what teachers agree on and what one alone said, with their configs."""
    alone = [kind in UNCONFIRMED for kind in _given(positives, "kind")]
    for config, are_so in (("positives", False), ("answers", True)):
        yield config, positives.filter(pa.array([each is are_so for each in alone], pa.bool_()))


def positive_rows(positives: pa.Table, batch: str, keep: Keep | None = None) -> pa.Table:
    """Return the rows of the config `positives`: lessons, which are states with the action that teachers agree on."""
    actions = _each(positives, "action_json", lambda text: published_messages(f"[{text}]"))
    completions = [
        action or [message_of({"role": "assistant", "content": text})]
        for action, text in zip(actions, positives["action"].to_pylist(), strict=True)
    ]
    label = [True] * len(positives)
    return _rows(positives, batch, POSITIVES, {"completion": completions}, keep, label=label)


def _rows(
    table: pa.Table,
    batch: str,
    schema: pa.Schema,
    sides: Mapping[str, list[list[Message] | None]],
    keep: Keep | None,
    **made: list[Any],
) -> pa.Table:
    """Return rows of a config, with each side as the client of its state takes it."""
    prompts = _each(table, "state_messages_json", published_messages)
    tools = _each(table, "tools_json", published_tools)
    texts = _texts_of(table)
    folders = [
        folder or cwd_of(prompt or ())
        for folder, prompt in zip(_given(table, "cwd"), prompts, strict=True)
    ]
    shown: list[str | None] = [
        (own["tools"] if own else None) or neutral
        for own, neutral in zip(texts, tools, strict=True)
    ]
    read = {text: json_value(text) for text in {*shown} if text}
    forms = [
        NativeForm(prompt or (), read.get(text or ""), folder)
        for prompt, text, folder in zip(prompts, shown, folders, strict=True)
    ]
    made |= {
        name: [
            side and [message_of(form.rendered(message)) for message in side]
            for side, form in zip(of_rows, forms, strict=True)
        ]
        for name, of_rows in sides.items()
    }
    named = [keep(each) if each and keep else None for each in texts]
    made |= {"trace_batch": [batch] * len(table), "conversation": conversations_in(table)}
    return _table(
        table, schema, prompt=prompts, tools=tools, cwd=folders, client_texts=named, **made
    )


def _given(table: pa.Table | pa.RecordBatch, name: str) -> list[Any]:
    return table[name].to_pylist() if name in table.column_names else [None] * len(table)


def published_prompts(rows: pa.Table, side: str) -> pa.Table:
    """Return rows of the config `prompts`: states with a consensus, which is in the column `side`."""
    by_consensus = [source in (None, "consensus", REHEARSAL) for source in _given(rows, "source")]
    rows = rows.filter(pa.array(by_consensus, pa.bool_()))
    plain = "pair" if side == "chosen" else "agreement"
    return _table(
        rows,
        PROMPTS,
        consensus=[messages[-1] for messages in rows[side].to_pylist()],
        kind=[kind or plain for kind in _given(rows, "kind")],
    )


def _table(source: pa.Table, schema: pa.Schema, **made: list[Any]) -> pa.Table:
    """Return rows in these columns: made ones, those of `source`, and others that are null."""
    columns = [
        pa.array(made[field.name], field.type)
        if field.name in made
        else source[field.name].cast(field.type)
        if field.name in source.column_names
        else pa.nulls(len(source), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _each(table: pa.Table, name: str, convert: Callable[[str], Any]) -> list[Any]:
    return [None if text is None else convert(text) for text in table[name].to_pylist()]


def published_messages(messages_json: str) -> list[Message]:
    """Return messages in their published form, from JSON text.

    A system message in the middle of a conversation becomes a user message, because most chat
    templates allow a system message only at the beginning.
    """
    messages = [message_of(message) for message in json_value(messages_json)]
    for message in dropwhile(lambda each: each["role"] == "system", messages):
        if message["role"] == "system":
            message["role"] = "user"
    return messages


def message_of(message: Mapping[str, Any]) -> Message:
    """Return a message in its published form, without null content and with call arguments as JSON text.

    The arguments of both sides of a pair are formatted in the same way.
    """
    calls = message.get("tool_calls")
    return {
        "role": message["role"],
        "content": content_text(message.get("content")),
        "tool_calls": [_call(call) for call in calls] if calls else None,
        "tool_call_id": message.get("tool_call_id"),
    }


def content_text(content: Any) -> str:
    """Return the text of a message's content, which may consist of parts."""
    if isinstance(content, list):
        parts = [part.get("text", "") if isinstance(part, Mapping) else part for part in content]
        return "\n".join(map(str, parts))
    return content or ""


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = published_arguments(call)
    text = arguments if isinstance(arguments, str) else _encode(arguments).decode()
    named = {"name": function.get("name"), "arguments": text}
    return {"id": call.get("id"), "type": call.get("type") or "function", "function": named}


def published_arguments(call: Mapping[str, Any]) -> Any:
    """Return the arguments of a call as an object; text that isn't JSON stays text."""
    arguments = (call.get("function") or {}).get("arguments")
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json_value(arguments or "{}")
    except ValueError:
        return arguments


def with_objects(message: Mapping[str, Any]) -> Message:
    """Return a published message for chat templates, without nulls and with arguments as objects."""
    plain = {key: value for key, value in message.items() if value is not None}
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": published_arguments(call)}}
            for call in calls
        ]
    return plain


def json_of(message: Mapping[str, Any]) -> str:
    """Return a published message as JSON text."""
    return _encode(with_objects(message)).decode()


def tool_name(tool: Mapping[str, Any]) -> str | None:
    """Return the name of a tool in OpenAI's or Anthropic's form."""
    return (tool.get("function") or tool).get("name")


def published_tools(tools_json: str) -> str | None:
    """Return the tools as one JSON text, or None for a state without tools."""
    tools = json_value(tools_json)
    return _encode(tools).decode() if tools else None
