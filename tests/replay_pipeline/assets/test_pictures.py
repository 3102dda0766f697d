import base64
import re
from xml.etree import ElementTree

import pytest

from replay_pipeline.assets.pictures import bars, curves, histogram, quantile
from tests.hostile import HOSTILE

UNKIND = "".join(HOSTILE)


def picture(metadata) -> ElementTree.Element:
    data = re.fullmatch(
        r"!\[[^\]]*\]\(data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)\)", metadata.value
    )
    assert data, metadata.value
    return ElementTree.fromstring(base64.b64decode(data[1]))


def drawn(metadata, tag: str) -> list[ElementTree.Element]:
    return [e for e in picture(metadata).iter() if e.tag.endswith(f"}}{tag}")]


@pytest.mark.parametrize("values", [{"a": 0.0}, {"a": 1, UNKIND: 3}])
def test_bars_have_one_bar_each_whatever_their_names(values):
    metadata = bars("Title & <more>", values)
    assert len(drawn(metadata, "rect")) == 1 + len(values)
    assert {e.tag.rpartition("}")[2] for e in picture(metadata).iter()} == {"svg", "rect", "text"}


@pytest.mark.parametrize("lines", [{"a": [1.0]}, {"a": [3.0, 2.0], UNKIND: [2.0, 2.0, 2.0]}])
def test_curves_have_a_point_per_step(lines):
    metadata = curves("Loss", lines)
    points = [line.attrib["points"].split() for line in drawn(metadata, "polyline")]
    assert [len(line) for line in points] == [len(line) for line in lines.values()]


@pytest.mark.parametrize("values", [[1.0], [0.5, 0.5], [0.001, 1.0, 100.0, 0.0]])
def test_a_histogram_counts_every_positive_value(values):
    metadata = histogram("Latency", values, marks={"p50": 1.0, "p95": 200.0}, unit=" s")
    heights = [float(e.attrib["height"]) for e in drawn(metadata, "rect")[1:]]
    n_highest = max(heights)
    assert n_highest == 110.0
    assert 1 <= sum(height > 0 for height in heights) <= len(values)
    assert all(0 <= float(e.attrib["x1"]) <= 620 for e in drawn(metadata, "line"))


@pytest.mark.parametrize(
    "metadata",
    [bars("Errors", {}), curves("Loss", {}), histogram("Latency", [], marks={}, unit=" s")],
)
def test_nothing_to_draw_is_said_in_words(metadata):
    assert metadata.value.endswith(": none*") or "none" in metadata.value
    assert "svg" not in metadata.value


def test_quantiles_are_values_that_were_seen():
    assert quantile([], 0.5) == 0.0
    assert quantile([1.0], 0.95) == 1.0
    assert quantile([float(n) for n in range(100)], 0.95) == 95.0
