"""Convert tables of older versions to the present schemas, without any other source."""

from collections import Counter

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from replay_pipeline.errors import SchemaError
from replay_pipeline.storage.pair_rows import pair_id_of
from replay_pipeline.storage.schemas import PROMPT, SCHEMA_VERSION, TABLES
from replay_pipeline.storage.tables import DataRoot, readable, version_of
from replay_pipeline.types import conversation_of

_LATER = frozenset({
    "became", "chosen_trial", "conversation", "cwd", "evidence", "git_branch", "is_checked_right", "n_against",
    "n_cache_creation_1h_tokens", "p_better", "p_chosen_right", "pair_id", "params_json",
    "rejected_trial", "sent_turn_idx", "shape_turn_idx", "title", "trials_json", "why",
})  # fmt: skip
"""Columns that tables did not have at first. Older rows have there only what they show themselves."""


def upgrade_tables(root: DataRoot) -> dict[str, int]:
    """Rewrite the tables of an older version, and return the number of each.

    Each table is replaced as a whole, so a stopped upgrade continues where it was.

    Raises:
        SchemaError: a table can't be read, or has an unknown version.
    """
    done: Counter[str] = Counter()
    for name in TABLES:
        for batch in root.batches(name):
            found = _read(root, name, batch)
            version = version_of(found)
            if version == SCHEMA_VERSION and not set(TABLES[name].names) - set(found.column_names):
                continue
            if version not in ("1", "2", SCHEMA_VERSION):
                raise SchemaError(
                    f"{root.part(name, batch)}: schema version {version or 'unknown'}, which this program does not know; a newer version or another program wrote it"
                )
            if version == "1" and name == "turns":
                found = _without_actions(found, _read(root, "states", batch))
            # Until version 2 a pair held its whole prompt; now it names the state that has it.
            held = [column for column in PROMPT.names if column in found.column_names]
            found = found.drop_columns(held)
            root.write(name, batch, _with_later_columns(found, name))
            done[name] += 1
    return dict(done)


def _read(root: DataRoot, name: str, batch: str) -> pa.Table:
    path = root.part(name, batch)
    try:
        return pq.ParquetFile(readable(path)).read()
    except (OSError, pa.ArrowInvalid) as error:
        raise SchemaError(f"{path}: not a readable parquet file ({error})") from error


def _without_actions(turns: pa.Table, states: pa.Table) -> pa.Table:
    """Return version 1 stored an action twice: as a row of `states`, and first among its turn's messages."""
    places = ("session_id", "turn_idx")
    decided = set(zip(*(states[name].to_pylist() for name in places), strict=True))
    messages = turns["messages_json"].to_pylist()
    for row, place in enumerate(zip(*(turns[name].to_pylist() for name in places), strict=True)):
        if place in decided:
            _, *rest = msgspec.json.decode(messages[row], type=list[msgspec.Raw])
            messages[row] = msgspec.json.encode(rest).decode()
    column = turns.column_names.index("messages_json")
    return turns.set_column(column, "messages_json", pa.array(messages, pa.string()))


def _with_later_columns(table: pa.Table, name: str) -> pa.Table:
    for field in TABLES[name]:
        if field.name in table.column_names or field.name not in _LATER:
            continue
        values = [None] * table.num_rows
        if field.name == "pair_id":
            sides = (table[column].to_pylist() for column in ("state_id", "chosen", "rejected"))
            values = [pair_id_of(*row) for row in zip(*sides, strict=True)]
        elif field.name == "conversation":
            values = [each and conversation_of(each) for each in table["session_id"].to_pylist()]
        table = table.append_column(field, pa.array(values, field.type))
    return table
