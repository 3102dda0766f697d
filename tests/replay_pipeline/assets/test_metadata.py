"""Text of strangers in Markdown, and schemas. A real browser renders it in tests/browser."""

import pytest

from replay_pipeline.assets.of_stages import asset_of
from replay_pipeline.publish import layout
from replay_pipeline.stages.chain import STAGES
from replay_pipeline.stages.work.markdown import bars, code_block, literal_markdown, sparkline
from replay_pipeline.storage.schemas import TABLES, describe
from tests.hostile import HOSTILE


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_keeps_no_character_that_markdown_acts_on(text):
    shown = literal_markdown(text)
    assert not set("<>[]`|*_\\\x1b\x9b\u202e\n") & set(shown)
    assert "://" not in shown


@pytest.mark.parametrize("text", HOSTILE)
def test_a_code_block_is_left_only_by_its_own_fence(text):
    first, *lines, last = code_block(f"{text}\n```\n````\n{text}").split("\n")
    assert first == f"{last}text"
    assert set(last) == {"`"}
    assert not any(last in line for line in lines)
    assert not any(not c.isprintable() for line in lines for c in line)


def test_every_column_of_tables_and_of_the_published_dataset_is_described():
    columns = {**TABLES, "published": layout.PAIRS}
    assert all(describe(table, name) for table in TABLES for name in columns[table].names)
    for stage in STAGES[:-1]:
        (spec,) = asset_of(stage).specs
        shown = spec.metadata["dagster/column_schema"].columns
        table = stage.writes[0] if stage.writes else "published"
        assert [column.name for column in shown] == columns[table].names
        assert all(column.description for column in shown)


def test_bars_are_a_table_with_the_largest_first():
    lines = bars({"small": 1, "large": 3.5, "none": 0}).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| large", "| small", "| none"]
    assert [line.count("█") for line in lines[2:]] == [20, 5, 0]


def test_a_curve_is_a_line_of_blocks_each_the_mean_of_a_part():
    assert sparkline([3.0, 2.0, 1.0, 1.0]) == "█▅▁▁"
    assert sparkline([0.0] * 50 + [7.0] * 50, width=2) == "▁█"
    assert (sparkline([2.0]), sparkline([])) == ("▁", "")
