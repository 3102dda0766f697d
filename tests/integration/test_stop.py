"""Stop means stop: nothing more is bought, and nothing that is paid for is lost. `make stops` runs all."""

import signal

import pytest

from tests.support.stopping import stop

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("form", ["command line", "compose entry point"])
def test_a_signal_ends_the_buying_and_loses_no_answer(tmp_path, form):
    """Alone, and as a step of Dagster in a container that is stopped."""
    # Deaf as the first process of a container is: the kernel spares it what it does not listen to.
    done = stop(form, signal.SIGTERM, tmp_path, is_first=False, is_deaf=True)
    assert (done.n_late, done.n_lost, done.n_twice, done.n_off_nano) == (0, 0, 0, 0)


def test_a_supervisor_that_is_killed_still_stops_what_it_stood_before(tmp_path):
    done = stop("Kubernetes job", signal.SIGKILL, tmp_path, is_first=False, is_deaf=False)
    assert (done.n_late, done.n_lost) == (0, 0), "the one behind it is told to stop"
