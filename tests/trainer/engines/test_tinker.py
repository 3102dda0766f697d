"""The engine Tinker on a machine without its client; with it, `tests/frameworks/tinker`."""

import sys

import pytest

from trainer.__main__ import main
from trainer.engines.capabilities import check
from trainer.engines.settings_file import read_settings
from trainer.errors import TrainerConfigError


def test_without_its_client_tinker_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tinker", None)
    assert main(["tinker"]) == 2
    error = capsys.readouterr().err
    assert "the engine tinker needs the package tinker" in error
    assert "pip install 'tinker" in error


@pytest.mark.parametrize(
    ("trl", "message"),
    [
        ({"sdpo_estimator": "sampled", "jsd_beta": 0.5}, "set trl.jsd_beta=1.0"),
        ({"sdpo_estimator": "sampled", "jsd_beta": 1.0, "sdpo_token_clip": 0.1}, "take it out"),
        ({"sdpo_estimator": "teacher_topk", "teacher": "ema"}, "set trl.teacher=live"),
        ({"sdpo_estimator": "teacher_topk", "temperature": 0.7}, "set trl.temperature=1.0"),
    ],
)
def test_what_its_protocol_cannot_carry_is_refused(trl, message):
    values = {"dataset": "d", "output": "o", "rollouts": "generate", "trl": {"alpha_sdpo": 1} | trl}
    with pytest.raises(TrainerConfigError, match=message):
        check(read_settings(values, "tinker"))
