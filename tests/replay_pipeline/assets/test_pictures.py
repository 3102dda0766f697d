import base64
import re
from xml.etree import ElementTree

import pytest

from replay_pipeline.stages.work.markdown import MAX_CHARS, bars, curve, quantile
from tests.hostile import HOSTILE


def picture(metadata) -> ElementTree.Element:
    data = re.fullmatch(r"!\[[^\]]*\]\(data:image/svg\+xml;base64,([\w+/=]+)\)", metadata)
    assert data, metadata
    return ElementTree.fromstring(base64.b64decode(data[1]))


def drawn(metadata, tag: str) -> list[ElementTree.Element]:
    return [e for e in picture(metadata).iter() if e.tag.endswith(f"}}{tag}")]


def test_bars_are_a_table_with_the_largest_first():
    lines = bars({"small": 1, "large": 3.5, "none": 0}).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| large", "| small", "| none"]
    assert [line.count("█") for line in lines[2:]] == [20, 5, 0]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_bar_keeps_its_row_whatever_its_name(name):
    assert [line.count("|") for line in bars({name: 1}).splitlines()] == [4, 4, 4]


def test_many_bars_end_in_a_sum_of_the_rest():
    lines = bars({f"n{i}": 1 for i in range(100)}).splitlines()
    assert len(lines) == 15
    assert lines[-1].startswith("| 88 more | 88 |")


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0], [-1e-9, 3.0], [i**0.5 for i in range(1000)]])
def test_a_curve_has_a_point_per_step_until_it_is_thinned(values):
    metadata = curve("loss", values)
    (line,) = drawn(metadata, "polyline")
    points = [tuple(map(int, point.split(","))) for point in line.attrib["points"].split()]
    assert len(points) == min(len(values), 51)
    assert all(0 <= x <= 440 and 0 <= y <= 142 for x, y in points)
    assert len(metadata) <= MAX_CHARS


@pytest.mark.parametrize("metadata", [bars({}), curve("loss", [])])
def test_nothing_to_draw_is_said_in_words(metadata):
    assert metadata == "*none*"


def test_quantiles_are_values_that_were_seen():
    assert quantile([], 0.5) == 0.0
    assert quantile([1.0], 0.95) == 1.0
    assert quantile([float(n) for n in range(100)], 0.95) == 95.0
