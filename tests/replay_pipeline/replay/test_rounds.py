"""Random rounds against a server with its own bill; `benchmarks/money.py` plays as many as are wanted."""

from datetime import UTC, datetime, timedelta

import pytest

from benchmarks.money import play


@pytest.mark.slow
@pytest.mark.parametrize("seed", [101, 107, 114, 119])
def test_a_random_round_holds_its_ceiling_books_all_and_pays_nothing_twice(
    tmp_path, children, seed
):
    began = datetime.now(UTC)
    found = play(seed, children, tmp_path)
    assert (found.over_nano, found.unbooked_nano, found.n_paid_twice) == (0, 0, 0)
    assert found.share >= 0.95
    if found.held_usd:
        left = datetime.fromisoformat(found.held_until) - began
        assert left < timedelta(seconds=600), "it is said until when"
