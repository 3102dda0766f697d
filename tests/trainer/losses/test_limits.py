"""Gradients by finite differences, and what each loss becomes at its limits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.losses import (
    entropy_aware_opd_loss,
    generalized_jsd_loss,
    taid_loss,
)
from trainer.losses.channels import SDPOOptions, distillation_per_token
from trainer.losses.entropy_opd import (
    gated_forward_kl_per_token,
    reverse_kl_surrogate_per_token,
    soft_gated_kl_per_token,
)
from trainer.losses.logps import response_logps

INF = float("inf")


def logits(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype) * 2


def gradient(loss, student):
    student = student.clone().requires_grad_()
    value = loss(student)
    return value.detach(), torch.autograd.grad(value, student)[0]


LABELS = torch.tensor([[1, 2, -100], [0, -100, 3]])
MASK = (LABELS >= 0).double()


def sdpo(s, t, **options):
    """Return the mean of channel 2 over the counted tokens."""
    per_token = distillation_per_token(s, t, LABELS.clamp_min(0), SDPOOptions(**options))
    return (per_token * MASK).sum() / MASK.sum()


DISTILLATION = {
    "jsd forward": lambda s, t: generalized_jsd_loss(s, t, LABELS, beta=0.0),
    "jsd 0.3": lambda s, t: generalized_jsd_loss(s, t, LABELS, beta=0.3, temperature=1.3),
    "jsd reverse": lambda s, t: generalized_jsd_loss(s, t, LABELS, beta=1.0),
    "jsd top-k": lambda s, t: generalized_jsd_loss(s, t, LABELS, top_k=3),
    "sdpo top-k": lambda s, t: sdpo(s, t, estimator="topk", top_k=2),
    "eopd soft": lambda s, t: entropy_aware_opd_loss(s, t, labels=LABELS, h_max=1.0),
}
AT_TEMPERATURE = {
    "jsd": lambda s, t, **o: generalized_jsd_loss(s, t, LABELS, beta=0.3, **o),
    "sdpo top-k": lambda s, t, **o: sdpo(s, t, estimator="topk", top_k=2, **o),
    "sdpo sampled": lambda s, t, **o: sdpo(s, t, estimator="sampled", **o),
    "eopd soft": soft_gated_kl_per_token,
    "eopd forward": lambda s, t, **o: gated_forward_kl_per_token(s, t, top_k=3, **o),
    "eopd reverse": lambda s, t, **o: reverse_kl_surrogate_per_token(
        s, t, LABELS.clamp_min(0), old_logps=-MASK, **o
    ),
    "eopd": lambda s, t, **o: entropy_aware_opd_loss(s, t, labels=LABELS, **o),
}


@pytest.mark.parametrize("name", AT_TEMPERATURE)
def test_a_temperature_divides_the_logits_of_both_sides(name):
    student, teacher = logits(2, 3, 5), logits(2, 3, 5, seed=1)
    loss = AT_TEMPERATURE[name]
    at_two, plain = loss(student, teacher, temperature=2.0), loss(student, teacher)
    torch.testing.assert_close(at_two, loss(student / 2, teacher / 2))
    assert not torch.allclose(at_two, plain)


@pytest.mark.parametrize("name", DISTILLATION)
def test_equal_inputs_cost_nothing_and_pull_nowhere(name):
    same = logits(2, 3, 5)
    value, grad = gradient(lambda s: DISTILLATION[name](s, same), same)
    assert float(value) == pytest.approx(0.0, abs=1e-12)
    assert float(grad.abs().max()) < 1e-12


@pytest.mark.parametrize("name", ["taid", "eopd soft", "jsd"])
def test_an_empty_mask_gives_zero_with_a_graph(name):
    student, teacher = logits(2, 3, 5), logits(2, 3, 5, seed=1)
    empty = torch.full((2, 3), -100)
    losses = {
        "taid": lambda s: taid_loss(s, teacher, torch.zeros(2, 3), t=0.5),
        "eopd soft": lambda s: entropy_aware_opd_loss(s, teacher, labels=empty),
        "jsd": lambda s: generalized_jsd_loss(s, teacher, empty),
    }
    value, grad = gradient(losses[name], student)
    assert float(value) == 0.0
    assert float(grad.abs().max()) == 0.0


@pytest.mark.parametrize("name", [*DISTILLATION, "taid"])
def test_a_token_that_both_forbid_changes_nothing(name):
    """Minus infinity in both is an absent vocabulary entry: no NaN, no cost, no pull."""
    student, teacher = logits(2, 3, 5), logits(2, 3, 5, seed=1)
    loss = DISTILLATION.get(name, lambda s, t: taid_loss(s, t, MASK, t=0.5))
    value, grad = gradient(lambda s: loss(s, teacher), student)
    pad = torch.full((2, 3, 1), -INF, dtype=torch.float64)
    wide_teacher = torch.cat([teacher, pad], -1)
    wide_value, wide_grad = gradient(lambda s: loss(s, wide_teacher), torch.cat([student, pad], -1))
    assert float(wide_value) == pytest.approx(float(value), abs=1e-12)
    torch.testing.assert_close(wide_grad[..., :-1], grad)
    assert float(wide_grad[..., -1].abs().max()) == 0.0


def test_a_token_that_the_student_forbids_keeps_the_jsd_finite():
    student, teacher = logits(1, 1, 4), logits(1, 1, 4, seed=1)
    student[..., 0] = -INF
    value, grad = gradient(lambda s: generalized_jsd_loss(s, teacher), student)
    assert math.isfinite(float(value))
    assert bool(torch.isfinite(grad).all())


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_bf16_logits_never_make_a_divergence_negative(beta):
    """A log-softmax rounded to bf16 would: here the difference is far below its resolution."""
    student = logits(4, 8, 512, dtype=torch.float32)
    teacher = student + 1e-2 * logits(4, 8, 512, seed=1, dtype=torch.float32)
    exact = generalized_jsd_loss(student, teacher, beta=beta)
    rounded = generalized_jsd_loss(student.bfloat16(), teacher.bfloat16(), beta=beta)
    assert rounded.dtype == torch.float32
    assert float(rounded) > 0
    assert float(rounded) == pytest.approx(float(exact), rel=0.5)
    both = student.bfloat16(), teacher.bfloat16()
    entries = generalized_jsd_loss(*both, beta=beta, reduction="none").sum(-1)
    assert bool((entries > -1e-6).all())


@given(seed=st.integers(0, 10_000), beta=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
@settings(max_examples=25, deadline=None)
def test_no_divergence_is_negative_and_shifts_of_logits_change_nothing(seed, beta):
    student, teacher = logits(3, 2, 7, seed=seed), logits(3, 2, 7, seed=seed + 1)
    entries = generalized_jsd_loss(student, teacher, beta=beta, reduction="none").sum(-1)
    assert bool((entries >= -1e-12).all())
    shifted = (student + 5.0, teacher - 3.0)
    shifted = generalized_jsd_loss(*shifted, beta=beta, reduction="none").sum(-1)
    torch.testing.assert_close(entries, shifted)


MASKED = {
    "jsd": lambda s, t, mask: generalized_jsd_loss(s, t, torch.where(mask == 1, 0, -100)),
    "taid": lambda s, t, mask: taid_loss(s, t, mask, t=0.5),
    "eopd": lambda s, t, mask: entropy_aware_opd_loss(
        s, t, labels=torch.where(mask == 1, 0, -100), mode="additive"
    ),
}


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_nan_logits_of_masked_rows_touch_neither_value_nor_gradient(name, side):
    """A padded row may hold anything, as where attention has nothing to attend to."""
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    clean = {"student": logits(2, 3, 7), "teacher": logits(2, 3, 7, seed=1)}
    dirty = {key: value.detach().clone() for key, value in clean.items()}
    dirty[side][mask == 0] = float("nan")
    results = []
    for sides in (clean, dirty):
        student = sides["student"].detach().clone().requires_grad_()
        loss = MASKED[name](student, sides["teacher"].detach(), mask)
        results.append((loss.detach(), torch.autograd.grad(loss, student)[0]))
    torch.testing.assert_close(results[0], results[1])
    assert bool((results[1][1][mask == 0] == 0).all())


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_a_token_that_one_side_alone_forbids_makes_a_kl_infinite(beta):
    """A number that happens to be large would be trained on; an infinite loss ends the run."""
    sides = [logits(1, 1, 4), logits(1, 1, 4, seed=1)]
    sides[int(beta)][..., 2] = -INF
    assert float(generalized_jsd_loss(*sides, beta=beta)) == INF


def test_an_impossible_token_costs_everything_where_it_counts_and_nothing_elsewhere():
    found = logits(1, 3, 4)
    found[0, 0, 1] = -INF
    ids = torch.tensor([[0, 1, 2]])
    summed, n = response_logps(found, ids, torch.tensor([[0, 1, 1]]))
    assert (float(summed), float(n)) == (-INF, 2)
    summed, n = response_logps(found, ids, torch.tensor([[0, 0, 1]]))
    assert math.isfinite(float(summed))
    assert float(n) == 1
