import runpy
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[3] / "recipes" / "quickstart" / "run.py"


@pytest.mark.slow
def test_quickstart_has_three_live_channels_and_loses_99_percent(capsys):
    assert runpy.run_path(str(RECIPE))["main"]([]) == 0
    assert "3 channels live" in capsys.readouterr().out
