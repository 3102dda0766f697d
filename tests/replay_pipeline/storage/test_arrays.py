import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_pipeline.storage.arrays import array_of, string_array

TEXTS = st.one_of(st.none(), st.text(max_size=12))
NUMBERS = st.one_of(st.none(), st.integers(-(2**31), 2**31 - 1))


@settings(deadline=None)
@given(st.lists(TEXTS, max_size=20))
def test_texts_become_the_array_that_arrow_makes(values: list[str | None]):
    assert string_array(values).equals(pa.array(values, pa.string()))


@settings(deadline=None)
@given(st.lists(TEXTS, max_size=20))
def test_bytes_are_taken_for_utf8(values: list[str | None]):
    encoded = [None if value is None else value.encode() for value in values]
    array = string_array(encoded)
    array.validate(full=True)
    assert array.to_pylist() == values


def test_half_a_surrogate_pair_is_replaced():
    assert string_array(["a\ud800b", "c"]).to_pylist() == ["a?b", "c"]


@pytest.mark.parametrize("kind", [pa.int32(), pa.int64(), pa.float64(), pa.timestamp("ms", "UTC")])
@settings(deadline=None)
@given(values=st.lists(NUMBERS, max_size=20))
def test_numbers_become_the_array_that_arrow_makes(kind: pa.DataType, values: list[int | None]):
    assert array_of(values, kind).equals(pa.array(values, kind))


@settings(deadline=None)
@given(st.lists(st.one_of(st.none(), st.lists(st.text(max_size=5), max_size=3)), max_size=10))
def test_lists_become_the_array_that_arrow_makes(values: list[list[str] | None]):
    kind = pa.list_(pa.string())
    assert array_of(values, kind).equals(pa.array(values, kind))
