"""The credit form of channel 3 has the pairwise gradient; channel 2 from support and from tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.losses.channels import (
    VARIANTS,
    ReplayOptions,
    SDPOOptions,
    distillation_per_token,
    divergence_per_token,
    replay_credit,
    replay_per_pair,
    sampled_reverse_kl_per_token,
)
from trainer.losses.divergence import log_probs, with_tail


def pair_tokens(seed: int, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs of the tokens of three pairs [3, 2, 7], their mask, and reference sums [3, 2]."""
    generator = torch.Generator().manual_seed(seed)
    logps = -scale * torch.rand(3, 2, 7, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, 8, (3, 2), generator=generator)
    mask = (torch.arange(7) < lengths[..., None]).double()
    reference = -scale * lengths * torch.rand(3, 2, generator=generator, dtype=torch.float64)
    return logps, mask, reference


def pairwise_gradient(logps, mask, reference, options) -> torch.Tensor:
    leaf = logps.clone().requires_grad_()
    sums, lengths = (leaf * mask).sum(-1), mask.sum(-1)
    sides = (*sums.unbind(-1), *lengths.unbind(-1), *reference.unbind(-1))
    (gradient,) = torch.autograd.grad(replay_per_pair(*sides, options).sum(), leaf)
    return gradient


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    scale=st.floats(0.01, 8.0),
    variant=st.sampled_from(tuple(VARIANTS)),
    rpo_alpha=st.sampled_from([0.0, 0.7]),
)
def test_credit_has_exactly_the_pairwise_gradient(seed, scale, variant, rpo_alpha):
    logps, mask, reference = pair_tokens(seed, scale)
    options = ReplayOptions(variant=variant, rpo_alpha=rpo_alpha)
    sums, lengths = (logps * mask).sum(-1), mask.sum(-1)
    credits = torch.stack(
        replay_credit(*sums.unbind(-1), *lengths.unbind(-1), *reference.unbind(-1), options), -1
    )
    leaf = logps.clone().requires_grad_()
    # A policy loss by importance ratios, which are 1 at the policy that scored the pair.
    charge = -credits[..., None] * mask * (leaf - logps).exp()
    (gradient,) = torch.autograd.grad(charge.sum(), leaf)
    expected = pairwise_gradient(logps, mask, reference, options)
    error = (gradient - expected).norm() / expected.norm()
    assert float(error) <= 1e-12


@pytest.mark.parametrize("wrapper", ["none", "taid", "entropy_opd"])
def test_divergence_on_the_teachers_support_is_the_teacher_topk_estimator(wrapper):
    """What a scoring server sends (ids and log-probs) carries the whole of channel 2."""
    student = torch.randn(5, 40, dtype=torch.float64)
    teacher = torch.randn(5, 40, dtype=torch.float64)
    options = SDPOOptions(estimator="teacher_topk", top_k=6, wrapper=wrapper, taid_t=0.3)
    whole = distillation_per_token(student, teacher, torch.zeros(5, dtype=torch.long), options)
    sent_logp, sent_ids = log_probs(teacher).topk(6, dim=-1)
    mine = with_tail(log_probs(student).gather(-1, sent_ids))
    torch.testing.assert_close(divergence_per_token(mine, with_tail(sent_logp), options), whole)


def test_token_level_form_has_the_reverse_kls_gradient_on_average():
    """Over all tokens, weighted by the student's own probability, it is the reverse KL's."""
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(7, dtype=torch.float64).log_softmax(-1)
    logp = logits.log_softmax(-1)
    expected_loss = (logp.exp() * (logp - teacher)).sum()
    (expected,) = torch.autograd.grad(expected_loss, logits, retain_graph=True)
    charge = (logp.exp().detach() * sampled_reverse_kl_per_token(logp, teacher)).sum()
    (gradient,) = torch.autograd.grad(charge, logits)
    torch.testing.assert_close(gradient, expected)
