"""A recorded top-k is the teacher's own: held to the core, which sees the teacher's logits."""

import math

import pytest
import torch

from tests.trainer.losses.pencil import kl, log
from trainer.losses.channels import SDPOOptions, distillation_per_token
from trainer.losses.recorded_teacher import NO_ENTRY, recorded_teacher_per_token

N, V, K = 5, 23, 4


def case():
    generator = torch.Generator().manual_seed(3)
    student = torch.randn(N, V, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(N, V, generator=generator, dtype=torch.float64)
    logp, ids = teacher.log_softmax(-1).topk(K, dim=-1)
    return student, teacher, ids, logp


@pytest.mark.parametrize(
    "options",
    [
        *({"jsd_beta": beta} for beta in (0.0, 0.3, 1.0)),
        {"wrapper": "taid", "taid_t": 0.6},
        {"wrapper": "entropy_opd", "entropy_opd_h_max": 1.2},
        {"token_clip": 0.05},
    ],
    ids=str,
)
def test_losses_and_gradients_are_those_of_the_teachers_own_top_k(options):
    student, teacher, ids, logp = case()
    options = SDPOOptions(**options, estimator="teacher_topk", top_k=K)
    expected = distillation_per_token(student, teacher, ids[:, 0], options)
    found = recorded_teacher_per_token(student, ids, logp, options)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    (wanted,) = torch.autograd.grad(expected.sum(), student)
    (given,) = torch.autograd.grad(found.sum(), student)
    torch.testing.assert_close(given, wanted, rtol=0, atol=1e-12)
    assert float(given.abs().max()) > 1e-3


@pytest.mark.parametrize(
    "options",
    [*({"jsd_beta": beta} for beta in (0.0, 0.5, 1.0)), {"wrapper": "entropy_opd"}],
    ids=str,
)
def test_a_token_with_fewer_entries_is_not_changed_by_its_neighbours(options):
    student, _, ids, logp = case()
    options = SDPOOptions(**options)
    short_ids, short_logp = ids.clone(), logp.clone()
    short_ids[0, 2:], short_logp[0, 2:] = NO_ENTRY, float("nan")
    mixed = recorded_teacher_per_token(student, short_ids, short_logp, options)
    alone = recorded_teacher_per_token(student[:1], ids[:1, :2], logp[:1, :2], options)
    torch.testing.assert_close(mixed[:1], alone)
    (gradient,) = torch.autograd.grad(mixed.sum(), student)
    assert bool(gradient.isfinite().all())


def test_a_student_that_agrees_pays_nothing_and_one_that_does_not_is_drawn_to_the_teacher():
    _, teacher, ids, logp = case()
    options = SDPOOptions(jsd_beta=0.0)
    same = recorded_teacher_per_token(teacher, ids, logp, options)
    torch.testing.assert_close(same, torch.zeros_like(same), atol=1e-9, rtol=0)
    logits = torch.zeros(N, V, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=5.0)
    losses = []
    for _ in range(60):
        loss = recorded_teacher_per_token(logits, ids, logp, options).mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.01 * losses[0]
    torch.testing.assert_close(logits.log_softmax(-1).gather(-1, ids), logp, atol=0.05, rtol=0)


def charge(ids, probabilities, **options):
    """What is charged for one token of a student with the probabilities 0.5, 0.3 and 0.2."""
    return recorded_teacher_per_token(
        log([[0.5, 0.3, 0.2]]), torch.tensor([ids]), log([probabilities]), SDPOOptions(**options)
    )


def test_recorded_entries_are_charged_by_hand():
    own, theirs = (0.2, 0.5, 0.3), (0.4, 0.35, 0.25)  # tokens 2 and 0, and the rest
    forward = charge([2, 0], [0.4, 0.35], jsd_beta=0.0)
    assert forward.tolist() == pytest.approx([kl(theirs, own)])
    reverse = charge([2, 0], [0.4, 0.35], jsd_beta=1.0)
    assert reverse.tolist() == pytest.approx([kl(own, theirs)])
    # No temperature: servers record at 1.
    colder = charge([2, 0], [0.4, 0.35], jsd_beta=1.0, temperature=0.5)
    assert torch.equal(colder, reverse)


@pytest.mark.parametrize(("h_max", "ceiling"), [(None, math.log(3)), (2.0, 2.0)])
def test_the_entropy_gate_opens_by_the_vocabulary_not_by_the_entries(h_max, ceiling):
    own, theirs = (0.3, 0.7), (0.6, 0.4)
    entropy = -sum(q * math.log(q) for q in theirs)
    gate = entropy / ceiling
    expected = gate * kl(theirs, own) + (1 - gate) * kl(own, theirs)
    options = {"wrapper": "entropy_opd", "entropy_opd_h_max": h_max}
    for ids, recorded in (([1], [0.6]), ([1, NO_ENTRY], [0.6, 0.9])):
        assert charge(ids, recorded, **options).tolist() == pytest.approx([expected])


def test_a_recorded_teacher_is_taken_in_the_students_precision_and_never_drawn():
    student, _, ids, logp = case()
    wide = student.detach()
    narrow, recorded = wide.bfloat16().requires_grad_(), logp.clone().requires_grad_()
    found = recorded_teacher_per_token(narrow, ids, recorded, SDPOOptions())
    assert found.dtype == torch.float32
    found.sum().backward()
    assert recorded.grad is None
    exact = recorded_teacher_per_token(narrow.detach().double(), ids, logp, SDPOOptions())
    torch.testing.assert_close(found.detach().double(), exact, rtol=1e-4, atol=1e-6)
