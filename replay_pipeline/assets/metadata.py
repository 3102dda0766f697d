"""Convert the facts of stages to Dagster's metadata: numbers, tables, and text.

Dagster's UI turns every plain number into a chart over the partitions.
"""

from typing import Any

import dagster as dg

from replay_pipeline.stages.markdown import Location, Markdown
from replay_pipeline.storage.schemas import TABLES, describe


def column_schema(table: str) -> dg.TableSchema:
    """Return the columns of a table, with their descriptions, for the asset's Columns tab."""
    return dg.TableSchema(
        columns=[
            dg.TableColumn(field.name, str(field.type), description=describe(table, field.name))
            for field in TABLES[table]
        ]
    )


def metadata_value(value: Any) -> Any:
    """Return a fact of a stage as a Dagster metadata value."""
    match value:
        case Markdown():
            return dg.MetadataValue.md(str(value))
        case Location():
            return dg.MetadataValue.path(str(value))
        case str() if value.startswith("https://"):
            return dg.MetadataValue.url(value)
    return value
