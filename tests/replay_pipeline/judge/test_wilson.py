"""The interval of a share: by what defines it, and by known numbers."""

import math

import pytest

from replay_pipeline.judge.precision import wilson_interval


@pytest.mark.parametrize(("n", "total"), [(1, 3), (5, 10), (9, 10), (150, 431), (3, 1_000)])
def test_at_its_ends_the_share_is_as_far_as_chance_goes(n, total):
    for end in wilson_interval(n / total, total):
        error = math.sqrt(end * (1 - end) / total)
        assert abs(n / total - end) == pytest.approx(1.959964 * error)


def test_it_holds_where_everything_or_nothing_was_so():
    assert wilson_interval(0.0, 0) == (0.0, 1.0)
    assert wilson_interval(0.0, 10) == pytest.approx((0.0, 0.277533), abs=1e-6)
    assert wilson_interval(1.0, 10) == pytest.approx((0.722467, 1.0), abs=1e-6)
