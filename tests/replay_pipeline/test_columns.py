from pathlib import Path

import pytest

from replay_pipeline import columns
from replay_pipeline.columns import ABOUT, describe, tables_page
from replay_pipeline.schemas import TABLES

PAGE = Path(__file__).parents[2] / "docs" / "tables.md"


@pytest.mark.parametrize("table", sorted(TABLES))
def test_every_column_says_what_it_means(table):
    assert ABOUT[table].endswith(".")
    for name in TABLES[table].names:
        assert describe(table, name).endswith((".", "…"))


def test_nothing_is_described_that_no_table_has():
    for table, described in columns._IN_TABLE.items():
        assert set(described) <= set(TABLES[table].names)
    everywhere = {name for schema in TABLES.values() for name in schema.names}
    assert set(columns._ANYWHERE) <= everywhere


def test_the_page_of_tables_is_made_from_the_schemas():
    assert PAGE.read_text("utf-8") == tables_page(), "run `make docs`"
