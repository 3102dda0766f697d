"""`balance_pairs`: what the untouched model prefers by itself tells nothing about the pairs."""

import copy
import json
import shutil
from functools import partial

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from replay_pipeline.stages.pages.training import sentences_of
from tests.trainer.programs import start_ranks, words_of
from tests.trainer.published import rows_of
from tests.trainer.training import PLAIN, save_tiny_model
from trainer.__main__ import main, report_words
from trainer.data.collator import ComposerDataCollator
from trainer.data.dataset import load_preference_data
from trainer.data.evaluation import preference_score
from trainer.engines.trl import ComposerConfig
from trainer.engines.trl.balance import balanced, refusal_of
from trainer.model.scoring import PairForward

pytestmark = pytest.mark.slow

FORWARD = PairForward(choice="padded: as set", max_tokens=32768)


def ranked(model, collator, rows, wrong):
    """The rows with sides turned so that the model ranks wrong what `wrong` says of an index."""
    margins = preference_score(model, collator, rows).margins
    return [
        {**row, "chosen": row["rejected"], "rejected": row["chosen"]}
        if (margin > 0) is wrong(i)
        else row
        for i, (row, margin) in enumerate(zip(rows, margins, strict=True))
    ]


@pytest.fixture
def collator(tokenizer):
    return ComposerDataCollator(
        tokenizer, max_prompt_tokens=256, max_response_tokens=64, with_tools=False
    )


@pytest.fixture
def args(tmp_path):
    return ComposerConfig(output_dir=str(tmp_path), **PLAIN)


def test_both_kinds_weigh_the_same_and_the_smaller_one_all(model, collator, args):
    rows = ranked(model, collator, rows_of(3), wrong=lambda i: i % 4 != 0)
    rows[1]["weight"] = 0.5
    imitated = {**rows[0], "rejected": rows[0]["chosen"]}
    found, counts = balanced([*rows, imitated], model, collator, FORWARD, args)
    assert counts == {"n_ranked_right": 3, "n_ranked_wrong": 9}
    assert refusal_of(**counts) is None
    factors = [row["balance"] for row in found]
    assert factors == [1.0 if i % 4 == 0 else pytest.approx(3 / 8.5) for i in range(12)] + [1.0]
    assert [{**row, "balance": None} for row in found[:-1]] == [
        {**row, "balance": None} for row in rows
    ]


@pytest.mark.parametrize("wrong", [True, False])
def test_pairs_of_one_kind_cannot_be_balanced(model, collator, args, wrong):
    rows = ranked(model, collator, rows_of(2), wrong=lambda _: wrong)
    _, counts = balanced(rows, model, collator, FORWARD, args)
    assert counts == {"n_ranked_right": 0 if wrong else 8, "n_ranked_wrong": 8 if wrong else 0}
    assert f"ranks all 8 pairs {'wrong' if wrong else 'right'}" in str(refusal_of(**counts))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_a_pair_of_half_the_balance_moves_the_model_half_as_much(composer, model):
    """Only the preference loss, and by plain gradients: Adam would hide the size of a step."""
    rows, moved = rows_of(1), []
    for balance in (1.0, 0.5):
        trainee = copy.deepcopy(model)
        before = torch.cat([each.detach().flatten().clone() for each in trainee.parameters()])
        trainer = composer(
            model=trainee, pairs=[{**row, "balance": balance} for row in rows], max_steps=1,
            policy_weight=0.0, beta_replay=1.0, optim="sgd", lr_scheduler_type="constant",
            max_grad_norm=0.0, weight_decay=0.0,
        )  # fmt: skip
        trainer.train()
        after = torch.cat([each.detach().flatten() for each in trainee.parameters()])
        moved.append(after - before)
    torch.testing.assert_close(moved[1], moved[0] / 2, atol=1e-7, rtol=1e-3)
    assert moved[0].abs().max() > 1e-5


def _turned(turn, row):
    return {"chosen": row["rejected"], "rejected": row["chosen"]} if turn[row["state_id"]] else {}


@pytest.fixture(scope="module")
def turned(dataset_folder, tmp_path_factory):
    """A dataset at whose pairs a model, which is beside it, always prefers the rejected side."""
    folder = tmp_path_factory.mktemp("turned")
    model_folder = save_tiny_model(folder / "model", rows_of(3), n_layers=1)
    shutil.copytree(dataset_folder, folder / "dataset")

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    read = ComposerDataCollator(
        tokenizer, max_prompt_tokens=512, max_response_tokens=256, with_tools=False
    )
    pairs = load_preference_data(str(folder / "dataset")).pairs
    tiny = AutoModelForCausalLM.from_pretrained(model_folder)
    margins = preference_score(tiny, read, pairs).margins
    turn = {row["state_id"]: margin > 0 for row, margin in zip(pairs, margins, strict=True)}
    [file] = (folder / "dataset" / "pairs").glob("train-*.parquet")
    written = Dataset.from_parquet(str(file))
    written.map(partial(_turned, turn), features=written.features).to_parquet(file)
    return folder


def words(turned, output, *settings):
    given = [f"model={turned}/model", f"dataset={turned}/dataset", f"output={output}", *settings]
    given += ["trl.max_steps=2", "evaluation.max_pairs=4", "evaluation.max_prompts=1"]
    return words_of(*given)


def test_a_model_that_prefers_every_rejected_side_only_imitates(turned, tmp_path, capsys):
    """By the default for pretrained models, and the report says why."""
    assert main(words(turned, tmp_path, "evaluation.max_new_tokens=4")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["channels_live"] == ["policy"]
    assert report["balance"] == {"n_ranked_right": 0, "n_ranked_wrong": report["pairs"]}
    assert f"ranks all {report['pairs']} pairs wrong" in report["channels_off"]["replay"]
    said = f"Channel replay taught nothing: {report['channels_off']['replay']}."
    assert said in report_words(report, {}).splitlines()
    assert {"kind": "fact", "text": said} in sentences_of(report)
    inspected = json.loads((tmp_path / "inspected.json").read_text())
    assert [row["balance"] for row in inspected if "rejected (scored)" in row] == [0.0] * 3


def test_ranks_share_the_scoring_and_agree(turned, tmp_path):
    ranks = start_ranks("-m", "trainer", *words(turned, tmp_path / "out"), n=2, folder=tmp_path)
    for process in ranks:
        status, errors = process.ended(400)
        assert status == 0, errors[-3000:]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["balance"] == {"n_ranked_right": 0, "n_ranked_wrong": report["pairs"]}
    assert report["channels_live"] == ["policy"]
