"""What the options of channels 2 and 3 choose, on cases small enough for a pencil."""

import math

import pytest
import torch
from pydantic import BaseModel

from tests.support.told import told_by
from tests.trainer.losses.pencil import kl, kl_terms, log
from trainer.engines.prime_rl.register import config_class
from trainer.errors import TrainerConfigError
from trainer.losses.channels import (
    VARIANTS,
    PreferenceVariant,
    ReplayOptions,
    SDPOOptions,
    distillation_per_token,
    divergence_per_token,
    replay_per_pair,
)
from trainer.settings import SharedSettings

P, Q = (0.5, 0.3, 0.2), (0.1, 0.25, 0.65)
"""Student and teacher: the teacher's likeliest entry is the student's least likely."""


def charge(student=P, teacher=Q, taken=0, **options) -> float:
    """What channel 2 charges for one token with these probabilities."""
    found = distillation_per_token(
        log([student]), log([teacher]), torch.tensor([taken]), SDPOOptions(**options)
    )
    assert found.shape == (1,)
    return float(found)


def scaled(weights) -> list[float]:
    return [weight / sum(weights) for weight in weights]


def jsd(p, q, beta) -> float:
    mixture = [(1 - beta) * a + beta * b for a, b in zip(p, q, strict=True)]
    return beta * kl(q, mixture) + (1 - beta) * kl(p, mixture)


def cross_entropy(target, p) -> float:
    return -sum(a * math.log(b) for a, b in zip(target, p, strict=True))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (SDPOOptions, {"wrapper": "best"}, "sdpo_wrapper='best' is not none, taid or entropy_opd"),
        (
            SDPOOptions,
            {"estimator": "half"},
            "sdpo_estimator='half' is not full, topk, teacher_topk or sampled",
        ),
        (
            SDPOOptions,
            {"estimator": "sampled", "wrapper": "entropy_opd"},
            "sdpo_wrapper='entropy_opd' needs distributions: with sdpo_estimator='sampled' "
            "only the log-prob of the sampled token is known",
        ),
        (SDPOOptions, {"taid_t": -0.1}, "taid_t=-0.1 is not in [0, 1]"),
        (SDPOOptions, {"taid_t": 1.1}, "taid_t=1.1 is not in [0, 1]"),
        (SDPOOptions, {"jsd_beta": -0.1}, "jsd_beta=-0.1 is not in [0, 1]"),
        (SDPOOptions, {"jsd_beta": 1.1}, "jsd_beta=1.1 is not in [0, 1]"),
        (SDPOOptions, {"temperature": 0.0}, "temperature=0.0 must be positive"),
        (ReplayOptions, {"rpo_alpha": -0.5}, "rpo_alpha=-0.5 is negative"),
        (ReplayOptions, {"label_smoothing": 0.5}, "label_smoothing=0.5 is not in [0, 0.5)"),
        (
            ReplayOptions,
            {"variant": "kto"},
            "dpo_variant='kto' is not dpo, dpo_norm, simpo, ipo, robust, bco_pair, apo_zero or apo_down",
        ),
    ],
)
def test_a_wrong_option_of_a_channel_is_named(kind, options, message):
    assert told_by(TrainerConfigError, kind, **options) == message


def test_the_plain_divergence_takes_weight_temperature_support_and_cap():
    assert charge() == pytest.approx(jsd(P, Q, 0.5))
    assert charge(jsd_beta=0.0) == pytest.approx(kl(Q, P))
    assert charge(jsd_beta=1.0) == pytest.approx(kl(P, Q))
    assert charge(jsd_beta=0.3) == pytest.approx(jsd(P, Q, 0.3))
    rooted_p, rooted_q = (scaled([math.sqrt(one) for one in side]) for side in (P, Q))
    assert charge(jsd_beta=1.0, temperature=2.0) == pytest.approx(kl(rooted_p, rooted_q))
    kept_p, kept_q = scaled(P[1:]), scaled(Q[1:])
    assert charge(jsd_beta=1.0, top_k=2) == pytest.approx(kl(kept_p, kept_q))
    capped = sum(min(term, 0.2) for term in kl_terms(P, Q))
    assert charge(jsd_beta=1.0, token_clip=0.2) == pytest.approx(capped)


def test_a_support_keeps_its_entries_and_adds_up_the_rest():
    # The student's likeliest entry is the first, the teacher's is the last.
    own, theirs = ((0.5, 0.5), (0.1, 0.9)), ((0.2, 0.8), (0.65, 0.35))
    for estimator, (p, q) in (("topk", own), ("teacher_topk", theirs)):
        options = {"estimator": estimator, "top_k": 1}
        assert charge(**options, jsd_beta=1.0) == pytest.approx(kl(p, q))
        capped = sum(min(term, 0.1) for term in kl_terms(p, q))
        assert charge(**options, jsd_beta=1.0, token_clip=0.1) == pytest.approx(capped)
        mixed = scaled([a**0.6 * b**0.4 for a, b in zip(p, q, strict=True)])
        found = charge(**options, wrapper="taid", taid_t=0.4)
        assert found == pytest.approx(cross_entropy(mixed, p))


def test_a_support_without_a_size_has_a_hundred_entries():
    student = torch.linspace(0, 2, 130, dtype=torch.float64)[None]
    teacher = torch.linspace(1, -1, 130, dtype=torch.float64)[None].cos()
    p, q = student[0].softmax(-1)[-100:].tolist(), teacher[0].softmax(-1)[-100:].tolist()
    found = distillation_per_token(
        student, teacher, torch.tensor([0]), SDPOOptions(estimator="topk", jsd_beta=1.0)
    )
    expected = kl([*p, 1 - sum(p)], [*q, 1 - sum(q)])
    assert float(found) == pytest.approx(expected)


def test_the_sampled_estimator_looks_at_the_taken_token_alone():
    for taken, (p, q) in enumerate(zip(P, Q, strict=True)):
        expected = (math.log(p) - math.log(q)) * math.log(p)
        assert charge(estimator="sampled", taken=taken) == pytest.approx(expected)
    p, q = (side[1] ** 2 / sum(one**2 for one in side) for side in (P, Q))
    expected = (math.log(p) - math.log(q)) * math.log(p)
    assert charge(estimator="sampled", taken=1, temperature=0.5) == pytest.approx(expected)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_wrapper_sees_both_sides_at_the_temperature(temperature):
    p, q = (scaled([one ** (1 / temperature) for one in side]) for side in (P, Q))
    mixed = scaled([a**0.75 * b**0.25 for a, b in zip(p, q, strict=True)])
    found = charge(wrapper="taid", taid_t=0.25, temperature=temperature)
    assert found == pytest.approx(cross_entropy(mixed, p))
    for h_max in (None, 2.0):
        gate = cross_entropy(q, q) / (h_max or math.log(3))
        found = charge(wrapper="entropy_opd", entropy_opd_h_max=h_max, temperature=temperature)
        assert found == pytest.approx(gate * kl(q, p) + (1 - gate) * kl(p, q))


@pytest.mark.parametrize(
    "options",
    [
        *({"estimator": name} for name in ("full", "topk", "teacher_topk", "sampled")),
        {"wrapper": "taid", "taid_t": 0.5},
        {"wrapper": "entropy_opd"},
    ],
    ids=str,
)
def test_no_teacher_is_drawn_to_its_student(options):
    student, teacher = log([P]).requires_grad_(), log([Q]).requires_grad_()
    options = SDPOOptions(**options)
    distillation_per_token(student, teacher, torch.tensor([1]), options).sum().backward()
    assert teacher.grad is None
    assert bool(student.grad.any())
    if options.estimator != "sampled":
        divergence_per_token(student, teacher, options).sum().backward()
        assert teacher.grad is None


CHOSEN, REJECTED = torch.tensor([-2.0, -1.0, 0.0]), torch.tensor([-6.0, -0.5, -1.0])
N_CHOSEN, N_REJECTED = torch.tensor([4.0, 1.0, 0.0]), torch.tensor([3.0, 1.0, 2.0])
REFERENCE = torch.tensor([-3.0, -1.0, 0.0]), torch.tensor([-5.0, -2.0, -1.0])


@pytest.mark.parametrize(
    ("options", "margins"),
    [
        # beta * ((chosen - its reference) - (rejected - its reference))
        ({}, [0.1 * (1 + 1), 0.1 * (0 - 1.5), 0.1 * (0 - 0)]),
        ({"dpo_beta": 2.0}, [2 * (1 + 1), 2 * (0 - 1.5), 2 * (0 - 0)]),
        # the same of sums divided by tokens: 4 and 3, 1 and 1, none and 2
        ({"variant": "dpo_norm", "dpo_beta": 2.0}, [2 * (1 / 4 + 1 / 3), 2 * -1.5, 2 * 0]),
        # beta * (chosen - rejected) - gamma, per token
        ({"variant": "simpo"}, [2 * (-0.5 + 2) - 1, 2 * (-1 + 0.5) - 1, 2 * (0 + 0.5) - 1]),
        (
            {"variant": "simpo", "simpo_beta": 3.0, "simpo_gamma": 0.5},
            [3 * (-0.5 + 2) - 0.5, 3 * (-1 + 0.5) - 0.5, 3 * (0 + 0.5) - 0.5],
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("rpo_alpha", [0.0, 0.5])
def test_a_pair_is_charged_by_its_margin_and_its_chosen_sides_likelihood(
    options, margins, rpo_alpha
):
    options = ReplayOptions(**options, rpo_alpha=rpo_alpha)
    found = replay_per_pair(CHOSEN, REJECTED, N_CHOSEN, N_REJECTED, *REFERENCE, options)
    expected = [
        math.log1p(math.exp(-margin)) + rpo_alpha * unlikely
        for margin, unlikely in zip(margins, (0.5, 1.0, 0.0), strict=True)
    ]
    assert found.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("variant", ["dpo", "dpo_norm"])
def test_a_variant_with_a_reference_needs_both_sides_of_it(variant, missing):
    reference = [None if side == missing else given for side, given in enumerate(REFERENCE)]
    options = ReplayOptions(variant=variant)
    with pytest.raises(TrainerConfigError) as caught:
        replay_per_pair(CHOSEN, REJECTED, N_CHOSEN, N_REJECTED, *reference, options)
    assert str(caught.value) == f"dpo_variant='{variant}' needs reference log-probs"


def test_a_preference_loss_is_one_function_with_one_registration(monkeypatch):
    """Settings, messages and engines know it at once."""
    hinge = PreferenceVariant(lambda sides, _: (1 - sides.chosen + sides.rejected).relu(), False)
    monkeypatch.setitem(VARIANTS, "hinge", hinge)
    shared = SharedSettings(beta_replay=1.0, dpo_variant="hinge")
    shared.check()
    assert not shared.preference.needs_reference
    sums, counts = torch.tensor([[-1.0], [-1.5]]), torch.ones(2, 1)
    found = replay_per_pair(*sums, *counts, None, None, shared.preference)
    torch.testing.assert_close(found, torch.tensor([0.5]))
    assert "hinge" in str(config_class(BaseModel).model_fields["dpo_variant"].annotation)
    with pytest.raises(TrainerConfigError, match="apo_zero, apo_down or hinge"):
        SharedSettings(dpo_variant="kto").check()
