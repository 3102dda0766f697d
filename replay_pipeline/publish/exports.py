"""Export the pairs in the file formats of other trainers.

If a format can't express a part of a pair, that part is written as text, in the form that Hermes
and Qwen use. So nothing of a pair is lost: calls go between `<tool_call>` tags, results between
`<tool_response>` tags, and tools between `<tools>` tags in the system message.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import msgspec
import yaml

from replay_pipeline.errors import ConfigError
from replay_pipeline.publish import layout
from replay_pipeline.publish.client_texts import texts_in, with_client_texts
from replay_pipeline.publish.earlier import read_manifests
from replay_pipeline.publish.folder import alone, list_files, replace_files
from replay_pipeline.publish.secret_scan import SecretScan
from replay_pipeline.publish.splits import SPLITS
from replay_pipeline.publish.templates import has_place_for_calls
from replay_pipeline.types import ExportFormat, Message

LEFT_OUT = "[earlier messages are left out]"
CALL_FORM = '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """The files that were written for another trainer."""

    folder: str
    format: ExportFormat
    config: str
    """The config that the pairs come from."""
    rows_by_split: dict[str, int]
    """Number of rows by split. Every row of the config is in one split."""
    max_length: int | None
    """Tokens of the longest pair, by the dataset's own count. `None` if they weren't counted."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)


def export(
    dataset: Path,
    folder: Path,
    form: ExportFormat,
    *,
    config: str | None = None,
    model: Path | None = None,
) -> ExportReport:
    """Write the pairs of a published dataset in another trainer's file format.

    The folder changes from its old content to the new one in one step. Other files in it stay.

    Args:
        dataset: the dataset folder.
        folder: folder for the files.
        form: the trainer whose format to write.
        config: config of the pairs. By default, the one with the shortest prompts, else all uncut
            pairs.
        model: folder of the model to train. For `trl`, calls are written as text if its chat
            template can't show them.

    Raises:
        ConfigError: the format or config doesn't exist, or the model's chat template can't be used.
        SecretFoundError: a secret is in the rows. Nothing was written.
        StorageError: the folder can't be written. It is unchanged.
    """
    if form not in get_args(ExportFormat):
        raise ConfigError(f"format {form!r} is not one of {', '.join(get_args(ExportFormat))}")
    row_of = _ROWS[form]
    if form == "trl" and model is not None and has_place_for_calls(model) is False:
        row_of = _trl_as_text
    manifests = read_manifests(dataset)
    config = _config_of(manifests, dataset, config)
    n_rows: dict[str, int] = dict.fromkeys(SPLITS, 0)
    with TemporaryDirectory(prefix="export-") as aside, alone(folder):
        files: dict[str, bytes | Path] = {}
        for split in SPLITS:
            file = Path(aside) / f"{split}.jsonl"
            with file.open("wb") as lines:
                for row in _rows(dataset, manifests, config, split):
                    lines.write(_encode(row_of(row)) + b"\n")
                    n_rows[split] += 1
            if n_rows[split]:
                files[file.name] = file
        files |= _companions(form, sorted(files))
        ours = {"train.jsonl", "test.jsonl", layout.CARD, "dataset_info.json"}
        replace_files(folder, files, (ours & list_files(folder)) - files.keys())
    longest = [m.get("tokens", {}).get("longest", {}).get(config, 0) for m in manifests.values()]
    return ExportReport(
        folder=str(folder),
        format=form,
        config=config,
        rows_by_split=n_rows,
        max_length=max(longest, default=0) or None,
    )


def _config_of(manifests: Mapping[str, Row], dataset: Path, config: str | None) -> str:
    there = [
        name
        for name in layout.configs_of(manifests.values())
        if layout.schema_of(name) is layout.PAIRS
        and any(name in manifest["files"] for manifest in manifests.values())
    ]
    chosen = config or next(iter([*filter(layout.length_of, there), *there]), "pairs")
    if chosen not in there:
        raise ConfigError(
            f"{dataset}: there are no pairs in the config {chosen!r}; "
            f"{'there are ' + ', '.join(there) if there else 'publish some first'}"
        )
    return chosen


def _rows(
    dataset: Path, manifests: Mapping[str, Row], config: str, split: str
) -> Iterator[dict[str, Any]]:
    scan, texts = SecretScan("export"), texts_in(dataset)
    for key in sorted(manifests):
        for name in sorted(manifests[key]["files"].get(config, {}).get(split, {})):
            path = dataset / layout.batch_dir(config, split, key) / name
            for part in layout.read_shard(path, config):
                scan.take(part, config)
                yield from (with_client_texts(row, texts) for row in part.to_pylist())
    scan.finish()


_encode = msgspec.json.Encoder().encode


def _other_columns(row: Row) -> dict[str, Any]:
    return {
        key: value
        for key, value in row.items()
        if key not in ("prompt", "chosen", "rejected", "tools")
    }


def _openai(row: Row) -> dict[str, Any]:
    """Return messages and tools in the OpenAI form: arguments are JSON text."""
    sides = {
        name: [{k: v for k, v in message.items() if v is not None} for message in row[name]]
        for name in ("prompt", "chosen", "rejected")
    }
    return {**sides, "tools": _tools(row), **_other_columns(row)}


def _trl(row: Row) -> dict[str, Any]:
    """Return messages as chat templates want them: arguments are objects."""
    names = ("prompt", "chosen", "rejected")
    sides = {name: [layout.with_objects(message) for message in row[name]] for name in names}
    return {**sides, "tools": _tools(row), **_other_columns(row)}


def _trl_as_text(row: Row) -> dict[str, Any]:
    """Return messages as chat templates want them that have no place for calls."""
    return {**_plain_row(row), "tools": None, **_other_columns(row)}


def _tools(row: Row) -> list[dict[str, Any]] | None:
    return json.loads(row["tools"]) if row["tools"] else None


def _plain_row(row: Row) -> dict[str, Any]:
    """Return roles and text alone, user and assistant in turns: what every chat template renders."""
    system, turns = _turns(row["prompt"])
    texts = [system] if system else []
    if tools := _tools(row):
        listed = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
        form = ["You can call these tools:", "<tools>", *listed, "</tools>", "Write a call as"]
        texts.append("\n".join([*form, CALL_FORM]))
    head = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    return {
        "prompt": head + [_plain(turn) for turn in turns],
        "chosen": [_plain(row["chosen"])],
        "rejected": [_plain(row["rejected"])],
        "state_id": row["state_id"],
        "session_id": row["session_id"],
    }


def _axolotl(row: Row) -> dict[str, Any]:
    plain = _plain_row(row)
    return {"messages": plain.pop("prompt"), **plain}


def _sharegpt(row: Row) -> dict[str, Any]:
    """Return ShareGPT turns with calls and results of their own, as LLaMA-Factory reads them."""
    system, turns = _turns(row["prompt"])
    head = [{"from": "system", "value": system}] if system else []
    return {
        "conversations": head + [_sharegpt_turn(turn) for turn in turns],
        "chosen": _sharegpt_turn(row["chosen"]),
        "rejected": _sharegpt_turn(row["rejected"]),
        "tools": row["tools"] or "",
        "state_id": row["state_id"],
        "session_id": row["session_id"],
    }


def _sharegpt_turn(turn: Sequence[Message]) -> dict[str, str]:
    roles = {message["role"] for message in turn}
    if roles == {"tool"}:
        # How LLaMA-Factory itself joins the results of several calls.
        joined = "\n</tool_response>\n<tool_response>\n".join(m["content"] for m in turn)
        return {"from": "observation", "value": joined}
    if roles != {"assistant"}:
        return {"from": "human", "value": _plain(turn)["content"]}
    calls = [call for message in turn for call in _functions(message)]
    if not calls or any(message["content"] for message in turn):
        return {"from": "gpt", "value": _plain(turn)["content"]}
    return {"from": "function_call", "value": json.dumps(calls, ensure_ascii=False)}


def _turns(prompt: Sequence[Message]) -> tuple[str, list[list[Message]]]:
    """Return the system message, and the others in turns: user or tools first, then the assistant."""
    system = [m["content"] for m in prompt if m["role"] == "system"]
    turns: list[list[Message]] = []
    for message in prompt:
        if message["role"] == "system":
            continue
        is_answer = message["role"] == "assistant"
        if turns and (turns[-1][0]["role"] == "assistant") == is_answer:
            turns[-1].append(message)
        elif not turns and is_answer:
            turns += [[{"role": "user", "content": LEFT_OUT}], [message]]
        else:
            turns.append([message])
    if not turns or turns[-1][0]["role"] == "assistant":
        turns.append([{"role": "user", "content": "Go on."}])
    return "\n\n".join(system), turns


def _plain(turn: Sequence[Message]) -> dict[str, str]:
    """Return a turn as one message of text."""
    parts: list[str] = []
    for message in turn:
        text = message["content"]
        if message["role"] == "tool":
            parts.append(f"<tool_response>\n{text}\n</tool_response>")
            continue
        calls = [
            f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"
            for function in _functions(message)
        ]
        parts.append("\n".join([text] * bool(text) + calls))
    role = "assistant" if turn[0]["role"] == "assistant" else "user"
    return {"role": role, "content": "\n\n".join(part for part in parts if part)}


def _functions(message: Message) -> list[dict[str, Any]]:
    return [
        {"name": call["function"]["name"], "arguments": layout.published_arguments(call)}
        for call in message.get("tool_calls") or ()
    ]


_ROWS: dict[ExportFormat, Callable[[Row], dict[str, Any]]] = {
    "trl": _trl,
    "llama-factory": _sharegpt,
    "axolotl": _axolotl,
    "unsloth": _plain_row,
    "jsonl": _openai,
}


def _companions(form: ExportFormat, names: Sequence[str]) -> dict[str, bytes]:
    """Return what a trainer wants beside the rows to read them."""
    if form == "trl":
        return {layout.CARD: _declared(names)}
    if form == "llama-factory":
        return {"dataset_info.json": _encode(_dataset_info(names))}
    return {}


def _declared(names: Sequence[str]) -> bytes:
    """Declare messages as `Json`, so that `datasets` does not make every call have every argument."""
    features = [
        {"name": field.name, "list": "json"}
        if field.name in ("prompt", "chosen", "rejected", "tools")
        else layout.features_of([field])[0]
        for field in layout.PAIRS
    ]
    metadata = {
        "configs": [
            {
                "config_name": "pairs",
                "default": True,
                "data_files": [{"split": Path(name).stem, "path": name} for name in names],
            }
        ],
        "dataset_info": [{"config_name": "pairs", "features": features}],
    }
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n".encode()


def _dataset_info(names: Sequence[str]) -> dict[str, Any]:
    """Describe the files as LLaMA-Factory's `dataset_info.json` does."""
    columns = {name: name for name in ("chosen", "rejected", "tools")}
    return {
        f"pairs_{Path(name).stem}": {
            "file_name": name,
            "formatting": "sharegpt",
            "ranking": True,
            "columns": {"messages": "conversations", **columns},
            "tags": {
                "role_tag": "from",
                "content_tag": "value",
                "user_tag": "human",
                "assistant_tag": "gpt",
                "observation_tag": "observation",
                "function_tag": "function_call",
                "system_tag": "system",
            },
        }
        for name in names
    }
