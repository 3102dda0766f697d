import base64
import re
from xml.etree import ElementTree

import pytest

from replay_pipeline.assets.metadata import bars, curve, inert, markdown_table

HOSTILE = "<script>alert(1)</script> [x](javascript:alert(1)) ![i](http://e/x) `code` \x1b[31m|"


def picture(metadata) -> ElementTree.Element:
    data = re.search(r"base64,([A-Za-z0-9+/=]+)\)", metadata.value)
    assert data
    return ElementTree.fromstring(base64.b64decode(data[1]))


def test_hostile_text_is_shown_and_never_interpreted():
    shown = inert(HOSTILE)
    assert not set("<>[]`|\x1b") & set(shown)


def test_a_table_keeps_its_columns_whatever_the_text():
    table = markdown_table([{"chosen": HOSTILE, "rejected": "a\nb"}]).value
    assert [line.count("|") for line in table.splitlines()] == [3, 3, 3]


def test_long_text_is_cut_to_a_readable_length():
    assert len(inert("x" * 10_000)) < 500


@pytest.mark.parametrize("values", [{}, {"a": 0.0}, {"a": 1, HOSTILE: 3}])
def test_bars_are_a_valid_picture(values):
    drawn = picture(bars("Title & <more>", values))
    assert sum(e.tag.endswith("rect") for e in drawn.iter()) == 1 + len(values)


@pytest.mark.parametrize("values", [[], [1.0], [3.0, 2.0, 1.0], [2.0, 2.0]])
def test_a_curve_is_a_valid_picture_with_a_point_per_step(values):
    (line,) = [e for e in picture(curve("Loss", values)).iter() if e.tag.endswith("polyline")]
    assert len(line.attrib["points"].split()) == len(values)
