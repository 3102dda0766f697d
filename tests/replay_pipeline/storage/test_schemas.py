import re
from pathlib import Path

import pytest

from replay_pipeline.settings import Settings
from replay_pipeline.storage import schemas
from replay_pipeline.storage.schemas import ABOUT, TABLES, describe
from tools.reference import settings_page, tables_page

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("table", sorted(TABLES))
def test_every_column_says_what_it_means(table):
    assert ABOUT[table].endswith(".")
    for name in TABLES[table].names:
        assert describe(table, name).endswith((".", "…"))


def test_nothing_is_described_that_no_table_has():
    everywhere = {name for schema in TABLES.values() for name in schema.names}
    assert set(schemas._DECLARED["everywhere"]) <= everywhere


def test_reference_pages_are_made_from_the_code():
    assert (DOCS / "tables.md").read_text("utf-8") == tables_page(), "run `make docs`"
    assert (DOCS / "settings.md").read_text("utf-8") == settings_page(), "run `make docs`"


def test_every_setting_says_what_it_means_and_the_example_is_valid(tmp_path):
    assert "|  |" not in settings_page()
    (example,) = re.findall(r"```toml\n(.*?)```", settings_page(), re.DOTALL)
    (tmp_path / "s.toml").write_text(example)
    settings = Settings.load(tmp_path / "s.toml")
    assert [teacher.name for teacher in settings.replay.teachers] == ["local", "deepseek"]
