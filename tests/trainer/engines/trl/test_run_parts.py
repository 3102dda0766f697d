"""What a run says of channels that teach nothing, and what a host may put into a run."""

from pathlib import Path

import pytest

from trainer.data.dataset import PreferenceData
from trainer.data.tiny import RESPONSE_TEMPLATE
from trainer.engines.settings_file import read_settings
from trainer.engines.trl.run import RunParts, off_channels, run, trl_config
from trainer.errors import TrainerConfigError
from trainer.settings import RunConfig

HINTED = {"prompt": [{"role": "user", "content": "go"}], "hint": "Error: no such file"}


def arguments(tmp_path: Path, **trl):
    return trl_config(RunConfig(dataset="d", output=str(tmp_path), trl=trl), tmp_path)


@pytest.mark.parametrize(
    ("pair", "weights", "off"),
    [
        (HINTED, {"alpha_sdpo": 0.1, "beta_replay": 1.0}, {}),
        (
            HINTED | {"hint": None},
            {"alpha_sdpo": 0.1, "beta_replay": 1.0},
            {"sdpo": "no row of the dataset has a hint"},
        ),
        (
            HINTED,
            {"policy_weight": 0.0, "alpha_sdpo": 0.1},
            {"policy": "policy_weight is 0", "replay": "beta_replay is 0"},
        ),
    ],
)
def test_a_channel_that_cannot_teach_has_its_reason_before_the_first_step(
    tmp_path, pair, weights, off
):
    assert off_channels(arguments(tmp_path, **weights), PreferenceData(pairs=[pair])) == off


def test_a_run_that_would_learn_nothing_is_refused(tmp_path):
    settings = arguments(tmp_path, policy_weight=0.0, alpha_sdpo=0.1)
    with pytest.raises(TrainerConfigError, match="sdpo: no row of the dataset has a hint"):
        off_channels(settings, PreferenceData(pairs=[HINTED | {"hint": None}]))


def test_an_environment_for_recorded_rollouts_is_refused(dataset_folder, tmp_path):
    config = read_settings(
        {
            "dataset": str(dataset_folder),
            "output": str(tmp_path),
            "tiny": {"vocab_size": 400, "hidden_size": 16, "n_layers": 1},
            "evaluation": {"max_pairs": 1, "max_prompts": 0},
        }
    )
    with pytest.raises(TrainerConfigError, match="nothing would be sampled"):
        run(config, parts=RunParts(environment=lambda *_: None))


def test_the_tiny_tokenizer_reads_the_tool_calls_that_it_writes(tokenizer):
    call = {"type": "function", "function": {"name": "Read", "arguments": {"p": "a b"}}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    start = RESPONSE_TEMPLATE["start_anchor"]
    before, _, response = text.partition(start)
    ids = [tokenizer(part)["input_ids"] for part in (before + start, response)]
    parsed = tokenizer.parse_response(ids[1], prefix=ids[0])
    assert parsed["tool_calls"] == [call, call]
