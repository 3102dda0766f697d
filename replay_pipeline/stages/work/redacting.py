"""Redact stored tables, for sessions whose logs no longer exist, and what teachers answered."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from replay_pipeline.ingesters.log_rows import Cleaner, strings_in
from replay_pipeline.redaction.redactor import Redactor, placeholders_in
from replay_pipeline.storage.arrays import string_array
from replay_pipeline.types import Message, TeacherAction

_TEXTS: Mapping[str, tuple[str, ...]] = {
    "sessions": ("project",),
    "turns": ("cwd", "messages_json", "thinking"),
    "states": ("cwd", "action_text", "action_tool_calls_json", "hint"),
    "tools": ("tool_json",),
}
"""The columns of an ingestion that hold what people and programs wrote."""
PROMPT_TEXTS: Mapping[str, tuple[str, ...]] = {
    "turns": ("messages_json",),
    "states": ("action_text", "action_tool_calls_json"),
}
"""Those that prompts are made of."""


def redacted_again(
    tables: Mapping[str, pa.Table], *, salt: str
) -> tuple[dict[str, pa.Table], dict[str, int]]:
    """Redact ingested tables by today's rules, and return them with the number of replacements.

    Placeholders don't change, so tables without new findings come back equal.
    """
    redactor = Redactor(salt=salt)
    columns = ((tables[name][column], column) for name in tables for column in _TEXTS[name])
    _, known = redactor.learn(
        string
        for column, name in columns
        for text in filter(None, column.to_pylist())
        for string in (strings_in(text) if name.endswith("_json") else [text])
    )
    cleaner = Cleaner(redactor, frozenset(), known)
    redacted = {name: _with_texts(tables[name], name, cleaner) for name in tables}
    return redacted, dict(redactor.counts)


def _with_texts(table: pa.Table, name: str, cleaner: Cleaner) -> pa.Table:
    for column in _TEXTS[name]:
        clean: Callable[[str], str] = (
            cleaner.arguments if column.endswith("_json") else cleaner.text
        )
        values = [text and clean(text) for text in table[column].to_pylist()]
        place = table.column_names.index(column)
        table = table.set_column(place, table.field(column), string_array(values))
    return table


class _Masked(Cleaner):
    """Redacts what was written by somebody who saw these placeholders."""

    def __init__(self, salt: str, shown: Iterable[str]) -> None:
        super().__init__(Redactor(salt=salt), frozenset())
        self._shown = placeholders_in(shown)

    def text(self, text: str) -> str:
        return self._redactor.masked(text, self._shown) if self._redactor else text

    def message(self, message: Message) -> Message:
        """Return an answer without secrets, in its text and in its calls."""
        calls = [
            call | {"function": told | {"arguments": self.arguments(told["arguments"])}}
            for call in message.get("tool_calls") or ()
            for told in [call["function"]]
        ]
        put = {"content": self.text(message["content"])} if message.get("content") else {}
        return message | put | ({"tool_calls": calls} if calls else {})


def masked_answers(
    answers: Sequence[TeacherAction], prompts: Sequence[pa.Table], *, salt: str
) -> list[TeacherAction]:
    """Return the answers without secrets: known ones, and those behind the placeholders of a batch.

    `prompts` are the columns of texts that their prompts are made of, redacted with `salt`.
    """
    columns = (column for table in prompts for column in table.columns)
    shown = (text for column in columns for text in column.to_pylist() if text)
    clean = _Masked(salt, shown)
    return [
        replace(
            answer,
            action=clean.message(answer.action) if answer.action else None,
            looks=tuple(replace(look, action=clean.message(look.action)) for look in answer.looks),
        )
        for answer in answers
    ]
