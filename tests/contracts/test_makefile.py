"""`make demo` in two steps, as a new clone runs it."""

import shutil
import subprocess
from pathlib import Path

REPO = Path(__file__).parents[2]


def test_the_demo_shows_pairs_before_it_installs_the_trainer_and_never_what_tests_need(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(REPO / name, tmp_path)
    done = subprocess.run(
        ["make", "-n", "demo"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    steps = [
        "pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[replay]';",
        "replay-pipeline demo  --until-pairs",
        "-e '.[dagster,normalize,publish,train]';",
        "replay-pipeline demo ",
    ]
    places = [done.stdout.index(step) for step in steps[:3]] + [done.stdout.rindex(steps[3])]
    assert places == sorted(places)
    assert "dev" not in done.stdout
    assert "[all" not in done.stdout
