"""Channel 2 of a teacher on record, inside TRL: held to the core, which sees the teacher's logits."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.programs import start_ranks
from tests.trainer.published import rows_of
from tests.trainer.training import PLAIN
from trainer.data.alignment import vocabulary_bytes
from trainer.data.rendering import Renderer
from trainer.data.rewards import as_trl_reward, consensus_reward
from trainer.data.rollouts import contrast_rollouts
from trainer.data.teacher_logprobs import AnswerReader
from trainer.data.tiny import make_model
from trainer.engines.settings_file import read_settings
from trainer.errors import DatasetError, TrainerConfigError
from trainer.losses.channels import SDPOOptions, distillation_per_token
from trainer.losses.divergence import with_tail
from trainer.trl import ComposerConfig
from trainer.trl.recorded_teacher import RecordedTeacherTrainer, recorded_answers
from trainer.trl.run import without_upstream_warnings

pytestmark = pytest.mark.slow

K = 6
ONLY_CHANNEL_2 = {
    "teacher": "recorded", "alpha_sdpo": 1.0, "policy_weight": 0.0, "beta_replay": 0.0,
    "max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
}  # fmt: skip


def token_of(spelled):
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return list(spelled)


@torch.no_grad()
def recorded(teacher, renderer, rows):
    """What a server of `teacher` says of the chosen actions: its top-k at each of their tokens."""
    spelled = vocabulary_bytes(renderer.tokenizer)
    found = []
    for row in rows:
        prompt, answer = renderer.prompt_ids(row["prompt"]), renderer.response_ids(row["chosen"])
        logits = teacher(input_ids=torch.tensor([prompt + answer])).logits[0]
        logp = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        positions = []
        for token_id, of_token in zip(answer, logp, strict=True):
            top = of_token.topk(K).indices.tolist()
            ids = [token_id, *(other for other in top if other != token_id)]
            positions.append([[token_of(spelled[i]), float(of_token[i])] for i in ids])
        found.append({**row, "logprobs": json.dumps(positions)})
    return found


def scored_by(teacher, renderer):
    """The answers of a session as a teacher that is sure of something scores them, and the reader."""
    with torch.no_grad():
        teacher.model.norm.weight.mul_(30)
    reader = AnswerReader(renderer)
    return reader.read(recorded(teacher, renderer, rows_of(1))), reader


@pytest.fixture
def parts(model, tokenizer):
    renderer = Renderer(
        tokenizer=tokenizer, max_prompt_tokens=256, max_response_tokens=64, with_tools=False
    )
    teacher = make_model(tokenizer, hidden_size=32, n_layers=2, n_heads=2, seed=5).eval()
    answers, reader = scored_by(teacher, renderer)
    assert reader.counts["aligned"] == reader.counts["tokens"]
    with without_upstream_warnings():
        yield model, teacher, renderer, answers


def build(output, model, renderer, answers, **settings):
    args = ComposerConfig(output_dir=str(output), **(PLAIN | ONLY_CHANNEL_2 | settings))
    rollouts = contrast_rollouts(rows_of(3), renderer)
    rollouts.add_behaviour_logps(model)
    return RecordedTeacherTrainer(
        model,
        as_trl_reward(consensus_reward),
        args,
        pairs=rows_of(3),
        recorded=rollouts,
        processing_class=renderer.tokenizer,
        answers=answers,
    )


def core_gradient(model, teacher, answers, options):
    """The mean over all tokens, from the logits of both models."""
    charged = []
    for answer in answers:
        ids = torch.tensor([answer.prompt_ids + answer.answer_ids])
        place = slice(len(answer.prompt_ids) - 1, -1)
        student = model(input_ids=ids).logits[0, place]
        with torch.no_grad():
            target = teacher(input_ids=ids).logits[0, place].log_softmax(-1)
        # The written token counts too where it is none of the likeliest.
        for position, support in enumerate(answer.support):
            keep = torch.tensor(support)
            of_student = student[position].log_softmax(-1)
            both = [with_tail(logp[keep]) for logp in (of_student, target[position])]
            charged.append(
                distillation_per_token(
                    both[0].unsqueeze(0), both[1].unsqueeze(0), keep[:1], options
                )
            )
    loss = torch.cat(charged).mean()
    return loss, torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize(
    "settings",
    [
        {"jsd_beta": 0.0},
        {"jsd_beta": 0.5, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"sdpo_wrapper": "entropy_opd", "entropy_opd_h_max": 2.0},
    ],
    ids=str,
)
def test_loss_and_gradient_of_a_step_are_the_cores(tmp_path, parts, settings):
    model, teacher, renderer, answers = parts
    before = copy.deepcopy(model).eval()
    trainer = build(tmp_path, model, renderer, answers, pairs_per_step=len(answers), **settings)
    trainer.train()
    shared = trainer.composer
    options = SDPOOptions(
        jsd_beta=shared.jsd_beta,
        wrapper=shared.sdpo_wrapper,
        entropy_opd_h_max=shared.entropy_opd_h_max,
    )
    loss, gradients = core_gradient(before, teacher, answers, options)
    n_tokens = sum(len(answer.places) for answer in answers)
    noted = [row for row in trainer.state.log_history if "sdpo/n_tokens" in row]
    assert trainer.n_live_steps["policy"] == trainer.n_live_steps["replay"] == 0
    if "gradient_accumulation_steps" not in settings:
        assert noted[0]["sdpo/n_tokens"] == n_tokens
        assert noted[0]["sdpo/loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    # One step of plain gradient descent at rate 1: what moved is the gradient.
    moved = trainer.accelerator.unwrap_model(trainer.model).parameters()
    for old, new, gradient in zip(before.parameters(), moved, gradients, strict=True):
        torch.testing.assert_close(old - new, gradient, rtol=0, atol=1e-6)
    assert max(float(gradient.abs().max()) for gradient in gradients) > 1e-3


def test_the_other_channels_go_on_beside_it(tmp_path, parts):
    model, _, renderer, answers = parts
    trainer = build(
        tmp_path, model, renderer, answers, policy_weight=1.0, beta_replay=1.0, max_steps=2
    )
    trainer.train()
    assert trainer.n_live_steps == {"policy": 2, "sdpo": 2, "replay": 2}


def test_a_dataset_without_answers_says_how_to_publish_them(dataset_folder, tmp_path, tokenizer):
    settings = {"dataset": str(dataset_folder), "output": str(tmp_path)}
    config = read_settings(settings | {"trl": {"teacher": "recorded", "alpha_sdpo": 1.0}})
    with pytest.raises(DatasetError, match=r"publish\.teacher_logprobs"):
        recorded_answers(config, Renderer(tokenizer=tokenizer))
    off = read_settings(settings | {"trl": {"teacher": "recorded"}})
    assert recorded_answers(off, Renderer(tokenizer=tokenizer)) == ([], {})


@pytest.mark.parametrize("estimator", ["topk", "sampled"])
def test_estimators_that_need_more_than_the_record_are_refused(estimator, tmp_path):
    settings = {"teacher": "recorded", "alpha_sdpo": 1.0, "sdpo_estimator": estimator}
    with pytest.raises(TrainerConfigError, match="recorded teacher"):
        read_settings({"dataset": "d", "output": str(tmp_path), "trl": settings})


def test_two_ranks_learn_what_one_does_also_where_one_has_nothing_to_learn(tmp_path):
    from tests.trainer.trl.recorded_teacher_worker import main  # it imports from here

    alone, together = tmp_path / "alone", tmp_path / "together"
    together.mkdir()
    worker = "tests.trainer.trl.recorded_teacher_worker"
    ranks = start_ranks("-m", worker, str(together), n=2, folder=tmp_path)
    alone.mkdir()
    main(alone)
    for process in ranks:
        status, errors = process.ended(400)
        assert status == 0, errors[-3000:]
    expected = load_file(alone / "rank0-of-1.safetensors")
    for rank in ("0", "1"):
        weights = load_file(together / f"rank{rank}-of-2.safetensors")
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, atol=2e-6, rtol=0)
