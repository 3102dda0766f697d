import base64
import re
from xml.etree import ElementTree

import pytest

from replay_pipeline.stages.work.markdown import MAX_CHARS, bars, curve


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


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0], [-1e-9, 3.0], [i**0.5 for i in range(1000)]])
def test_a_curve_has_a_point_per_step_until_it_is_thinned(values):
    metadata = curve("loss", values)
    (line,) = drawn(metadata, "polyline")
    points = [tuple(map(int, point.split(","))) for point in line.attrib["points"].split()]
    assert len(points) == min(len(values), 51)
    assert all(0 <= x <= 440 and 0 <= y <= 142 for x, y in points)
    assert len(metadata) <= MAX_CHARS
