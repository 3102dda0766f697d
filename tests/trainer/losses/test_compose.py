"""One batch, three channels."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trainer import build_batch, compose_loss
from trainer.data.collator import EXAMPLE_ROW
from trainer.errors import AlignmentError, TrainerConfigError
from trainer.losses.channels import (
    VARIANTS,
    ReplayOptions,
    SDPOOptions,
    distillation_per_token,
    replay_per_pair,
)
from trainer.losses.compose import _say_once, gradient_norms

ON = {"alpha_sdpo": 0.3, "beta_replay": 0.7}


@pytest.fixture
def batch(tokenizer, model):
    rows = [EXAMPLE_ROW, {**EXAMPLE_ROW, "hint": None, "weight": 3.0}]
    return build_batch(tokenizer, rows=rows, reference=model)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("wrapper", ["none", "taid", "entropy_opd"])
def test_every_combination_has_a_gradient(model, batch, variant, wrapper):
    parts = compose_loss(model, batch, dpo_variant=variant, sdpo_wrapper=wrapper, taid_t=0.5, **ON)
    parts.total.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    assert parts.off == {}


def without(batch, *prefixes):
    return {k: v for k, v in batch.items() if not k.startswith(prefixes)}


def test_a_batch_that_counts_none_of_its_hints_leaves_channel_2_off(model, batch):
    none = torch.zeros_like(batch["response_mask"][:, 0])
    parts = compose_loss(model, {**batch, "sdpo_mask": none}, **ON)
    assert parts.off == {"sdpo": "no row of the batch has a hint"}


def test_a_shifted_teacher_response_is_refused(model, batch):
    batch["ctx_teacher_input_ids"] = batch["ctx_teacher_input_ids"].roll(1, dims=1)
    with pytest.raises(AlignmentError, match="of the student"):
        compose_loss(model, batch, **ON)


# --- by hand -------------------------------------------------------------------------------------


class Bigram(nn.Module):
    """The next token depends on the last one alone: each row holds its eighths."""

    def __init__(self, *eighths):
        super().__init__()
        self.table = nn.Parameter((torch.tensor(eighths, dtype=torch.float64) / 8).log())
        self.seen = []

    def forward(self, input_ids, attention_mask):
        self.seen.append(attention_mask.tolist())
        return SimpleNamespace(logits=self.table[input_ids])


def student():
    return Bigram([4, 2, 1, 1], [2, 4, 1, 1], [1, 1, 4, 2], [2, 2, 2, 2])


def hinted():
    return Bigram([2, 2, 2, 2], [4, 2, 1, 1], [4, 2, 1, 1], [2, 2, 2, 2])


def ids(*rows):
    return torch.tensor(rows)


def small_batch():
    return {
        "input_ids": ids([0, 1, 2, 3], [3, 3, 3, 3]),
        "response_mask": ids([0, 0, 1, 1], [0, 0, 0, 1]),
        "attention_mask": ids([1, 1, 1, 1], [0, 1, 1, 1]),
        # The second row has no hint, so nothing in it need line up.
        "ctx_teacher_input_ids": ids([3, 0, 1, 2, 3], [0, 0, 0, 0, 0]),
        "ctx_teacher_response_mask": ids([0, 0, 0, 1, 1], [0, 0, 0, 0, 0]),
        "ctx_teacher_attention_mask": ids([1, 1, 1, 1, 1], [0, 0, 0, 0, 1]),
        "sdpo_mask": torch.tensor([1, 0]),
        "dpo_chosen_input_ids": ids([0, 1, 0], [1, 1, 1]),
        "dpo_chosen_response_mask": ids([0, 1, 1], [0, 1, 1]),
        "dpo_chosen_attention_mask": ids([1, 1, 1], [0, 1, 1]),
        "dpo_chosen_ref_logprobs": -LOG_2 * torch.tensor([5.0, 2.0]),
        "dpo_rejected_input_ids": ids([0, 3, 3], [2, 2, 0]),
        "dpo_rejected_response_mask": ids([0, 1, 1], [0, 1, 0]),
        "dpo_rejected_attention_mask": ids([1, 1, 1], [1, 1, 0]),
        "dpo_rejected_ref_logprobs": -LOG_2 * torch.tensor([5.0, 2.0]),
        "dpo_weight": torch.tensor([1.0, 3.0]),
    }


LOG_2 = math.log(2)
EVERY = {"alpha_sdpo": 0.3, "beta_replay": 0.7, "teacher": hinted()}


def test_a_step_by_hand_is_told_whole():
    parts = compose_loss(student(), small_batch(), jsd_beta=0.0, dpo_beta=1.0, **EVERY)
    # Tokens 1 -> 2 (1/8), 2 -> 3 (1/4) and 3 -> 3 (1/4).
    lm_ce = (3 + 2 + 2) / 3 * LOG_2
    # KL(teacher || student) behind token 1, in log 2: 1/2 - 1/4; behind token 2: 1 + 1/4 - 2/8 - 1/8.
    sdpo = (0.25 + 0.875) / 2 * LOG_2
    # Chosen 1/4 * 1/4 and 1/2 * 1/2, rejected 1/8 * 1/4 and 1/2: their margins against the
    # reference are log 2 and -log 2, and count once and three times.
    replay = (math.log(1.5) + 3 * math.log(3)) / 4
    total = lm_ce + 0.3 * sdpo + 0.7 * replay
    found = (parts.lm_ce, parts.sdpo_jsd, parts.trace_replay_dpo, parts.total)
    assert [float(one.detach()) for one in found] == pytest.approx([lm_ce, sdpo, replay, total])
    assert parts.off == {}
    assert parts.metrics == pytest.approx(
        {
            "policy/loss": lm_ce,
            "policy/n_tokens": 3.0,
            "sdpo/loss": sdpo,
            "sdpo/n_tokens": 2.0,
            "replay/loss": replay,
            # Per token, in log 2: -2 against -2.5, and -1 against -1, which is no win.
            "replay/accuracy": 0.5,
            "replay/margin": 0.25 * LOG_2,
            "replay/n_pairs": 2.0,
            "loss/total": total,
        }
    )


def test_each_forward_pass_sees_the_mask_of_its_own_ids():
    model, teacher, batch = student(), hinted(), small_batch()
    compose_loss(model, batch, **EVERY | {"teacher": teacher})
    names = ("attention_mask", "dpo_chosen_attention_mask", "dpo_rejected_attention_mask")
    assert model.seen == [batch[name].tolist() for name in names]
    assert teacher.seen == [batch["ctx_teacher_attention_mask"].tolist()]


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, {}),
        ({"jsd_beta": 1.0}, {"jsd_beta": 1.0}),
        ({"temperature": 2.0}, {"temperature": 2.0}),
        ({"sdpo_top_k": 2}, {"top_k": 2}),
        ({"sdpo_token_clip": 0.05}, {"token_clip": 0.05}),
        ({"sdpo_wrapper": "taid", "taid_t": 0.3}, {"wrapper": "taid", "taid_t": 0.3}),
        ({"sdpo_wrapper": "entropy_opd"}, {"wrapper": "entropy_opd"}),
        (
            {"sdpo_wrapper": "entropy_opd", "entropy_opd_h_max": 2.0},
            {"wrapper": "entropy_opd", "entropy_opd_h_max": 2.0},
        ),
    ],
    ids=str,
)
def test_every_option_of_channel_2_arrives(given, options):
    parts = compose_loss(student(), small_batch(), **EVERY, **given)
    sides = (model.table.detach()[1:3] for model in (student(), hinted()))
    expected = distillation_per_token(*sides, ids(2, 3), SDPOOptions(**options)).mean()
    torch.testing.assert_close(parts.sdpo_jsd.detach(), expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dpo_beta": 0.6},
        {"rpo_alpha": 0.4},
        {"variant": "dpo_norm"},
        {"variant": "simpo"},
        {"variant": "simpo", "simpo_beta": 1.5},
        {"variant": "simpo", "simpo_gamma": 0.3},
    ],
    ids=str,
)
def test_every_option_of_channel_3_arrives(options):
    given = {"dpo_variant" if name == "variant" else name: it for name, it in options.items()}
    parts = compose_loss(student(), small_batch(), **EVERY, **given)
    sums = (torch.tensor([-4.0, -2.0]) * LOG_2, torch.tensor([-5.0, -1.0]) * LOG_2)
    n_tokens = (torch.tensor([2.0, 2.0]), torch.tensor([2.0, 1.0]))
    reference = (torch.tensor([-5.0, -2.0]) * LOG_2,) * 2
    losses = replay_per_pair(*sums, *n_tokens, *reference, ReplayOptions(**options))
    expected = float(losses @ torch.tensor([1.0, 3.0])) / 4
    assert float(parts.trace_replay_dpo.detach()) == pytest.approx(expected)


def test_pairs_that_weigh_little_count_as_much_and_those_of_weight_zero_not_at_all():
    for weight, expected in (([1e-4, 1e-4], (math.log(1.5) + math.log(3)) / 2), ([0.0, 0.0], 0.0)):
        batch = small_batch() | {"dpo_weight": torch.tensor(weight)}
        parts = compose_loss(student(), batch, dpo_beta=1.0, **EVERY)
        assert float(parts.trace_replay_dpo.detach()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("given", "n_tokens", "bits"),
    [
        ({}, 6, 2 + 3 + 2 + 3 * 2),
        ({"attention_mask": ids([1, 1, 1, 0], [0, 0, 0, 1])}, 3, 2 + 3 + 2),
        ({"response_mask": ids([1, 0, 0, 1], [0, 0, 0, 0])}, 1, 2),
        ({"labels": ids([-100, 0, -100, 2], [-100, -100, -100, -100])}, 2, 1 + 1),
        ({"response_mask": torch.zeros(2, 4)}, 0, 0),
    ],
    ids=["all", "no padding", "response", "labels", "nothing"],
)
def test_channel_1_counts_labels_or_responses_or_all_that_is_no_padding(given, n_tokens, bits):
    # Labels need not be the tokens: behind 0 comes 0 with 1/2, behind 2 comes 2 with 1/2.
    mask = {"attention_mask": torch.ones(2, 4)} if "response_mask" in given else {}
    batch = {"input_ids": small_batch()["input_ids"], **mask, **given}
    parts = compose_loss(student(), batch)
    expected = bits * LOG_2 / max(n_tokens, 1)
    assert float(parts.lm_ce.detach()) == pytest.approx(expected)
    assert parts.metrics == pytest.approx(
        {"policy/loss": expected, "policy/n_tokens": float(n_tokens), "loss/total": expected}
    )


def test_gradient_norms_are_those_of_the_weighted_channels():
    norms = compose_loss(student(), small_batch(), with_gradient_norms=True, **EVERY).metrics
    # p - onehot of 1 -> 2, 2 -> 3 and 3 -> 3, in eighths: (2, 4, -7, 1), (1, 1, 4, -6), (2, 2, 2, -6).
    squares = (4 + 16 + 49 + 1) + (1 + 1 + 16 + 36) + (4 + 4 + 4 + 36)
    assert norms["grad_norm/policy"] == pytest.approx(math.sqrt(squares) / 8 / 3)
    twice = {"alpha_sdpo": 0.6, "beta_replay": 1.4}
    doubled = compose_loss(
        student(), small_batch(), with_gradient_norms=True, **EVERY | twice
    ).metrics
    for name in ("sdpo", "replay"):
        assert norms[f"grad_norm/{name}"] > 0
        assert doubled[f"grad_norm/{name}"] == pytest.approx(2 * norms[f"grad_norm/{name}"])
    alone = compose_loss(student(), small_batch(), with_gradient_norms=True).metrics
    assert {name for name in alone if name.startswith("grad_norm")} == {"grad_norm/policy"}
    assert not any(
        name.startswith("grad_norm") for name in compose_loss(student(), small_batch()).metrics
    )


def test_a_gradient_norm_is_over_all_trained_parameters():
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(1)) for name in ("a", "b", "frozen")})
    model["frozen"].requires_grad_(requires_grad=False)
    both = 3 * model["a"] * model["frozen"] - 4 * model["b"]
    elsewhere = torch.ones(1, requires_grad=True) * 2
    losses = {"both": both.sum(), "one": model["b"].square().sum(), "none": elsewhere.sum()}
    found = gradient_norms(model, losses)
    assert found == {"grad_norm/both": 5.0, "grad_norm/one": 2.0, "grad_norm/none": 0.0}
    losses["both"].backward()  # the graph is still there
    assert float(model["a"].grad) == 3.0


SIMPO_HINT = " (add_reference_logps fills them in; dpo_variant='simpo' needs none)"


@pytest.mark.parametrize(
    ("missing", "options", "off"),
    [
        ((), {}, {"sdpo": "alpha_sdpo is 0", "replay": "beta_replay is 0"}),
        (
            ("ctx_teacher_input_ids", "ctx_teacher_response_mask"),
            ON,
            {
                "sdpo": "the batch has no ctx_teacher_input_ids, ctx_teacher_response_mask "
                "(no row has a hint?)"
            },
        ),
        (
            ("response_mask",),
            ON,
            {"sdpo": "the batch has no response_mask (no row has a hint?)"},
        ),
        (
            ("dpo_chosen_input_ids", "dpo_rejected_response_mask"),
            ON,
            {"replay": "the batch has no dpo_chosen_input_ids, dpo_rejected_response_mask"},
        ),
        (
            ("dpo_chosen_ref_logprobs", "dpo_rejected_ref_logprobs"),
            ON,
            {
                "replay": "the batch has no dpo_chosen_ref_logprobs, dpo_rejected_ref_logprobs"
                + SIMPO_HINT
            },
        ),
        (
            ("dpo_rejected_ref_logprobs",),
            ON,
            {"replay": "the batch has no dpo_rejected_ref_logprobs"},
        ),
        (("sdpo_mask", "ctx_teacher_attention_mask", "dpo_weight"), {"beta_replay": 1.0}, None),
    ],
    ids=str,
)
def test_the_reason_of_a_channel_that_is_off_is_told_in_full(caplog, missing, options, off):
    _say_once.cache_clear()
    with caplog.at_level("INFO", logger="trainer"):
        parts = compose_loss(student(), without(small_batch(), *missing), **options)
    off = {"sdpo": "alpha_sdpo is 0"} if off is None else off
    assert parts.off == off
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO" if reason.endswith("is 0") else "WARNING", f"channel {channel} is off: {reason}")
        for channel, reason in off.items()
    ]


def test_a_batch_without_pairs_leaves_channel_3_off():
    batch = {k: v[:0] if k.startswith("dpo_") else v for k, v in small_batch().items()}
    parts = compose_loss(student(), batch, **EVERY)
    assert parts.off == {"replay": "the batch has no pair"}
    assert "replay/loss" not in parts.metrics


def test_a_batch_without_a_hint_mask_counts_every_row():
    batch = without(small_batch(), "sdpo_mask")
    with pytest.raises(AlignmentError, match="row 1: 1 response tokens for the student, 0 for"):
        compose_loss(student(), batch, **EVERY)
    batch["response_mask"] = ids([0, 0, 1, 1], [0, 0, 0, 0])
    assert compose_loss(student(), batch, **EVERY).metrics["sdpo/n_tokens"] == 2.0


def test_what_is_wrong_with_a_batch_is_told_in_full():
    with pytest.raises(TrainerConfigError) as caught:
        compose_loss(student(), {})
    assert str(caught.value) == "the batch has no input_ids: build it with ComposerDataCollator"
    with pytest.raises(TrainerConfigError) as caught:
        compose_loss(student(), small_batch(), sdpo_wrapper="taid", **EVERY)
    assert str(caught.value) == "sdpo_wrapper='taid' needs taid_t, e.g. TAIDScheduler(...).t"
