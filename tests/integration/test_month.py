"""Nights under Dagster's own daemon, as `make month` has thirty of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forked import forked, forked_python

MONTH = Path(__file__).parents[2] / "benchmarks" / "month.py"


@pytest.mark.slow
def test_a_crash_and_the_night_after_end_with_everything_in_and_paid_once(tmp_path):
    """The benchmark holds the ledger to the server's bill, and the dataset to the sessions, by itself."""
    file = tmp_path / "month.json"
    done = subprocess.run(
        forked([sys.executable, MONTH, "--small", "--json", file], children=forked_python()),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "crash" in done.stdout
    report = json.loads(file.read_text())
    # The night of the crash has nothing to publish.
    assert report["runs"] == {"SUCCESS": 4, "FAILURE": 2}
    assert report["sessions"] == 4
    assert report["dataset_rows"] > 0
