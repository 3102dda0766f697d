"""Each loss on a case for a pencil: its defaults, its reductions, and what it says when it refuses."""

import math

import pytest
import torch

from tests.support.told import told_by
from tests.trainer.losses.pencil import EVEN, FORWARD, MIDDLE, REVERSE, SURE, log
from trainer.errors import AlignmentError, ShapeError, TrainerConfigError
from trainer.losses import (
    TAIDScheduler,
    dpo_loss,
    entropy_aware_opd_loss,
    generalized_jsd_loss,
    simpo_loss,
    taid_loss,
)
from trainer.losses.divergence import (
    jsd_entries,
    log_probs,
    masked_sum,
    renormalized,
    with_tail,
    without_uncounted,
)
from trainer.losses.entropy_opd import (
    reverse_kl_surrogate_per_token,
    soft_gated_kl_per_token,
)
from trainer.losses.logps import align_responses, response_logps, token_logps
from trainer.losses.preference import dpo_per_pair, simpo_per_pair
from trainer.losses.taid import taid_per_token

LOG_2, LOG_3 = math.log(2), math.log(3)
INF = float("inf")


# --- divergences ---------------------------------------------------------------------------------


def test_reductions_divide_by_what_they_name():
    student, teacher = log([[EVEN, EVEN, EVEN], [EVEN, EVEN, EVEN]]), log([[SURE, EVEN, SURE]] * 2)
    expected = {"sum": 4 * MIDDLE, "batchmean": 4 * MIDDLE / 2, "mean": 4 * MIDDLE / 12}
    for reduction, value in expected.items():
        found = generalized_jsd_loss(student, teacher, reduction=reduction)
        assert float(found) == pytest.approx(value)
    assert float(generalized_jsd_loss(student, teacher)) == pytest.approx(2 * MIDDLE)
    labels = torch.tensor([[1, 0, -100], [1, -100, -100]])
    expected = {"sum": 2 * MIDDLE, "batchmean": 2 * MIDDLE / 3, "mean": 2 * MIDDLE / 6}
    for reduction, value in expected.items():
        found = generalized_jsd_loss(student, teacher, labels, reduction=reduction)
        assert float(found) == pytest.approx(value)
    entries = generalized_jsd_loss(student, teacher, labels, reduction="none", beta=0.0)
    assert entries.shape == (3, 2)
    assert entries[0].tolist() == pytest.approx([0.75 * math.log(1.5), 0.25 * math.log(0.5)])


def test_what_two_logits_have_in_common_is_told_when_they_have_not():
    message = told_by(ShapeError, generalized_jsd_loss, torch.zeros(2, 5), torch.zeros(2, 6))
    assert message == (
        "student logits (2, 5) and teacher logits (2, 6) differ: select the same tokens from both, "
        "and use one vocabulary"
    )


@pytest.mark.parametrize(
    "loss",
    [
        soft_gated_kl_per_token,
        entropy_aware_opd_loss,
        lambda s, t: taid_per_token(s, t, t=0.5),
        lambda s, t: taid_loss(s, t, t=0.5),
    ],
)
def test_no_loss_spreads_one_sides_logits_over_the_others(loss):
    # Torch would: a single row is a row for every token.
    with pytest.raises(
        ShapeError, match=r"student logits \(1, 2, 3\) and teacher logits \(1, 1, 3"
    ):
        loss(torch.zeros(1, 2, 3), torch.zeros(1, 1, 3))


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (
            generalized_jsd_loss,
            {"reduction": "max"},
            "reduction='max' is not batchmean, mean, sum or none",
        ),
        (
            entropy_aware_opd_loss,
            {"mode": "hard"},
            "mode='hard' is neither 'soft' nor 'additive'",
        ),
        (
            entropy_aware_opd_loss,
            {"mode": "additive"},
            "mode='additive' needs labels: the ids that were sampled",
        ),
    ],
)
def test_unknown_words_are_named_with_the_known_ones(loss, options, message):
    even = torch.zeros(1, 2, 3)
    assert told_by(TrainerConfigError, loss, even, even, **options) == message


def test_numbers_out_of_range_are_named():
    s = torch.zeros(1, 2, 3)
    for beta in (-0.1, 1.1):
        message = told_by(TrainerConfigError, jsd_entries, s, s, beta)
        assert message == f"beta={beta} is not in [0, 1]"
    for h_max in (0.0, -1.0):
        message = told_by(TrainerConfigError, soft_gated_kl_per_token, s, s, h_max=h_max)
        assert message == f"h_max={h_max} must be positive (nats)"
    for t in (-0.1, 1.1):
        message = told_by(TrainerConfigError, taid_per_token, s, s, t=t)
        assert message == f"taid t={t} is not in [0, 1]"


def test_log_probs_keep_their_precision_and_stay_finite():
    for dtype, found in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        logp = log_probs(torch.tensor([0.0, 0.0, -INF], dtype=dtype))
        assert logp.dtype == found
        assert logp[:2].tolist() == pytest.approx([-LOG_2, -LOG_2])
        # Low enough to be impossible, high enough that a difference of two stays finite.
        assert torch.finfo(found).min / 2 < float(logp[2]) < -1e30
    colder = log_probs(log([0.6, 0.3, 0.1]), 0.5)
    assert colder.exp().tolist() == pytest.approx([0.36 / 0.46, 0.09 / 0.46, 0.01 / 0.46])


def test_the_rest_of_a_support_is_one_more_entry():
    found = with_tail(log([[0.5, 0.25], [0.1, 0.1]]))
    torch.testing.assert_close(found, log([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]))
    # Where nothing is left the rest is small, not impossible: a loss of it stays finite.
    nothing = with_tail(log([[0.5, 0.5]]))
    assert float(nothing[0, -1].exp()) == pytest.approx(1e-7, rel=1e-3)
    scaled = renormalized(log([[0.5, 0.25], [0.1, 0.1]]))
    torch.testing.assert_close(scaled, log([[2 / 3, 1 / 3], [0.5, 0.5]]))


def test_what_a_mask_leaves_out_may_hold_anything():
    values = torch.tensor([[1.0, 10.0, float("nan")], [INF, 100.0, 1000.0]])
    mask = torch.tensor([[1.0, 0.5, 0.0], [0.0, 2.0, 0.0]])
    assert float(masked_sum(values, mask)) == 1 + 5 + 200
    kept = without_uncounted(values.unsqueeze(-1), mask)
    assert kept.squeeze(-1).tolist() == [[1.0, 10.0, 0.0], [0.0, 100.0, 0.0]]


# --- entropy-aware OPD ---------------------------------------------------------------------------

H_SURE = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))


@pytest.mark.parametrize(
    ("h_max", "gate"), [(None, H_SURE / LOG_2), (1.0, H_SURE), (0.5, 1.0), (H_SURE * 4, 0.25)]
)
def test_the_soft_gate_blends_both_divergences(h_max, gate):
    expected = gate * FORWARD + (1 - gate) * REVERSE
    student, teacher = log([[EVEN, EVEN, EVEN]]), log([[SURE, EVEN, EVEN]])
    found = soft_gated_kl_per_token(student, teacher, h_max=h_max)
    assert found.tolist() == [pytest.approx([expected, 0.0, 0.0])]
    found = entropy_aware_opd_loss(student, teacher, h_max=h_max, reduction="none")
    assert found.tolist() == [pytest.approx([expected, 0.0, 0.0])]
    for options, n_tokens in (({"reduction": "sum"}, 1), ({"reduction": "mean"}, 3), ({}, 3)):
        loss = entropy_aware_opd_loss(student, teacher, h_max=h_max, **options)
        assert float(loss) == pytest.approx(expected / n_tokens)


def test_the_surrogate_is_clipped_where_the_policy_has_gone_far_enough():
    # p, its old value and the teacher's, of each sampled token
    student = log([[[0.5, 0.5], [0.125, 0.875], [0.125, 0.875], [0.22, 0.78]]])
    old = log([[0.25, 0.25, 0.25, 0.2]])
    teacher = log([[[0.75, 0.25], [0.125, 0.875], [0.5, 0.5], [0.4, 0.6]]])
    expected = [
        -1.2 * LOG_3,  # likelier, as the teacher wants: no more than 1.2 times
        0.8 * LOG_2,  # less likely, as it wants: no less than 0.8 times
        -0.5 * LOG_2,  # less likely, against it: charged in full
        -1.1 * LOG_2,  # between the clips
    ]
    ids = torch.zeros(1, 4, dtype=torch.long)
    found = reverse_kl_surrogate_per_token(student, teacher, ids, old_logps=old)
    assert found.tolist() == [pytest.approx(expected)]
    wider = reverse_kl_surrogate_per_token(student, teacher, ids, old_logps=old, clip=0.5)
    assert wider.tolist() == [pytest.approx([-1.5 * LOG_3, 0.5 * LOG_2, *expected[2:]])]


def test_the_additive_form_is_the_surrogate_and_the_gated_divergence():
    student = log([[[0.5, 0.25, 0.25], [0.2, 0.3, 0.5], [0.5, 0.25, 0.25]]])
    teacher = log([[[1 / 3] * 3, [0.1, 0.1, 0.8], [1 / 3] * 3]])
    labels = torch.tensor([[0, -100, 1]])
    old = log([[0.25, 0.9, 0.25]])
    surrogate = [-1.2 * math.log(4 / 3), -1.0 * math.log(4 / 3)]
    gated = (math.log(2 / 3) + 2 * math.log(4 / 3)) / 3
    shared = {"labels": labels, "old_logps": old, "mode": "additive"}
    found = entropy_aware_opd_loss(student, teacher, **shared, reduction="none")
    assert found.tolist() == pytest.approx([one + gated for one in surrogate])
    found = entropy_aware_opd_loss(student, teacher, **shared)
    assert float(found) == pytest.approx((sum(surrogate) + 2 * gated) / 2)
    half = entropy_aware_opd_loss(student, teacher, **shared, alpha=0.5, reduction="sum")
    assert float(half) == pytest.approx(sum(surrogate) + gated)
    closed = entropy_aware_opd_loss(
        student, teacher, **shared, entropy_threshold=1.2, reduction="sum"
    )
    assert float(closed) == pytest.approx(sum(surrogate))
    wider = entropy_aware_opd_loss(
        student, teacher, **shared, clip=0.3, entropy_threshold=1.2, reduction="sum"
    )
    assert float(wider) == pytest.approx(-(1.3 + 1.0) * math.log(4 / 3))


def test_the_additive_form_has_the_gates_defaults():
    # 20 entries: the 16 likeliest alone are summed. Two: an entropy of log 2 does not pass 0.8.
    ids = torch.tensor([[0]])
    for student, teacher, gated in (
        ([0.05] * 20, [0.06] * 16 + [0.01] * 4, 0.96 * math.log(1.2)),
        ([0.25, 0.75], EVEN, 0.0),
    ):
        advantage = math.log(teacher[0] / student[0])
        found = entropy_aware_opd_loss(
            log([[student]]), log([[teacher]]), labels=ids, mode="additive"
        )
        assert float(found) == pytest.approx(gated - advantage)
    two = entropy_aware_opd_loss(
        log([[[0.05] * 20]]),
        log([[[0.08] + [0.92 / 19] * 19]]),
        labels=ids,
        mode="additive",
        top_k=1,
    )
    assert float(two) == pytest.approx(0.08 * math.log(1.6) - math.log(1.6))


# --- TAID ----------------------------------------------------------------------------------------


def test_taid_at_its_ends_looks_at_one_side_alone():
    """What one side forbids must not make a NaN of the other, which has weight 1."""
    student, teacher = torch.tensor([[0.0, 0.0, -INF]]), torch.tensor([[0.5, 0.25, 0.25]]).log()
    assert taid_per_token(student, teacher, t=1.0).tolist() == pytest.approx([0.75 * LOG_2])
    student, teacher = torch.tensor([[0.0, 0.0, 0.0]]), torch.tensor([[0.0, 0.0, -INF]])
    assert taid_per_token(student, teacher, t=0.0).tolist() == pytest.approx([LOG_3])


def test_taid_widens_16_bit_logits():
    narrow = torch.tensor([[1.0, 2.0, 4.0]]).bfloat16()
    found = taid_per_token(narrow, narrow.flip(-1), t=0.5)
    assert found.dtype == torch.float32
    expected = taid_per_token(narrow.double(), narrow.flip(-1).double(), t=0.5)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    assert taid_per_token(narrow.double(), narrow.double(), t=0.5).dtype == torch.float64


def test_taid_is_a_mean_over_the_counted_tokens():
    student = log([[EVEN, SURE], [EVEN, EVEN]])
    teacher = log([[SURE, EVEN], [SURE, EVEN]])
    of_sure = -0.5 * (math.log(0.75) + math.log(0.25))
    found = taid_loss(student, teacher, t=1.0)
    assert float(found) == pytest.approx((3 * LOG_2 + of_sure) / 4)
    for mask, expected in (
        ([[0, 1], [0, 0]], of_sure),
        ([[1, 1], [0, 1]], (2 * LOG_2 + of_sure) / 3),
        ([[0, 0], [0, 0]], 0.0),
    ):
        assert float(taid_loss(student, teacher, torch.tensor(mask), t=1.0)) == pytest.approx(
            expected
        )


def test_a_taid_schedule_starts_where_the_paper_does():
    scheduler = TAIDScheduler(1000)
    assert scheduler.t == 0.4
    assert scheduler.state_dict() == {"t": 0.4, "previous_loss": None, "momentum": 0.0}
    assert scheduler.update_t(torch.tensor(2.0), 1) is None
    assert scheduler.state_dict() == {"t": 0.4, "previous_loss": 2.0, "momentum": 0.0}
    step = scheduler.update_t(1.0, 1)  # the loss has fallen by half
    assert step == pytest.approx(5e-4 / (1 + math.exp(-0.005)) * 0.6)
    assert scheduler.state_dict() == pytest.approx(
        {"t": 0.4 + 0.6 / 1000, "previous_loss": 1.0, "momentum": 0.005}
    )
    scheduler.update_t(1.0, 500)
    assert scheduler.t == pytest.approx(0.7)
    scheduler.update_t(1.0, 5000)
    assert scheduler.t == 1.0


def test_a_fallen_loss_moves_taid_faster_and_a_risen_one_slower():
    for loss, momentum in ((0.5, 0.1 * 0.5), (3.0, 0.1 * -2.0)):
        scheduler = TAIDScheduler(100, t_start=0.2, t_end=0.9, alpha=0.5, beta=0.9)
        scheduler.update_t(1.0, 0)
        step = scheduler.update_t(loss, 1)
        assert step == pytest.approx(0.5 / (1 + math.exp(-momentum)) * 0.8)
        assert scheduler.t == pytest.approx(0.2 + step)
        second = scheduler.update_t(loss, 2)  # the momentum fades
        assert second == pytest.approx(0.5 / (1 + math.exp(-0.9 * momentum)) * (0.8 - step))
        assert scheduler.t == pytest.approx(0.2 + step + second)


def test_taid_without_adaption_goes_by_the_step_alone():
    scheduler = TAIDScheduler(100, t_start=0.2, t_end=0.9, alpha=0.5, disable_adaptive=True)
    scheduler.update_t(1.0, 0)
    assert scheduler.update_t(0.5, 1) > 0.1
    assert scheduler.t == pytest.approx(0.2 + 0.7 / 100)


def test_a_loss_of_zero_or_one_that_explodes_does_not_stop_taid():
    scheduler = TAIDScheduler(10, beta=0.5)
    scheduler.update_t(0.0, 0)
    assert scheduler.update_t(0.0, 1) == pytest.approx(5e-4 * 0.5 * 0.6)
    assert scheduler.update_t(1e9, 2) == 0.0


@pytest.mark.parametrize(
    "numbers", [(0, 0.4, 1.0), (10, -0.1, 1.0), (10, 0.4, 1.1), (10, 0.6, 0.5)]
)
def test_a_taid_schedule_that_cannot_be_is_refused(numbers):
    assert told_by(TrainerConfigError, TAIDScheduler, *numbers) == (
        "TAID needs num_train_steps >= 1 and 0 <= t_start <= t_end <= 1, not "
        + ", ".join(map(str, numbers))
    )


def test_a_taid_state_is_json_and_comes_back():
    scheduler = TAIDScheduler(10)
    scheduler.load_state_dict({"t": 0.5, "previous_loss": 2, "momentum": 0})
    assert scheduler.state_dict() == {"t": 0.5, "previous_loss": 2.0, "momentum": 0.0}
    assert all(isinstance(value, float) for value in scheduler.state_dict().values())
    scheduler.load_state_dict({"t": 0.4, "previous_loss": None, "momentum": 0.0})
    assert scheduler.update_t(1.0, 0) is None


# --- preferences ---------------------------------------------------------------------------------


def test_preferences_have_their_papers_scale_by_default():
    chosen, rejected = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    sides = (chosen, rejected, torch.tensor([-2.0, -2.0]), torch.tensor([-2.0, -2.5]))

    def losses(*margins):
        return [math.log1p(math.exp(-margin)) for margin in margins]

    simpo = losses(2 * 0.5 - 1, 2 * -1 - 1)
    dpo = losses(0.1 * (1 - 0.5), 0.1 * (0 - 1.5))
    assert simpo_per_pair(chosen, rejected).tolist() == pytest.approx(simpo)
    assert float(simpo_loss(chosen, rejected)) == pytest.approx(sum(simpo) / 2)
    assert dpo_per_pair(*sides).tolist() == pytest.approx(dpo)
    assert float(dpo_loss(*sides)) == pytest.approx(sum(dpo) / 2)
    (term,) = losses(3 * 0.5 - 0.25)
    found = simpo_loss(chosen[:1], rejected[:1], beta=3.0, gamma=0.25)
    assert float(found) == pytest.approx(term)


@pytest.mark.parametrize("odd", [1, 2, 3])
def test_sides_that_are_not_the_same_pairs_are_refused(odd):
    # One pair would be compared with both.
    sides = [torch.zeros(1 if side == odd else 2) for side in range(4)]
    message = told_by(ShapeError, dpo_loss, *sides)
    assert message == "log-probabilities of shape (2,) and (1,) can't belong to the same pairs"


# --- log-probabilities of tokens -----------------------------------------------------------------


def test_tokens_have_the_log_probability_of_the_logits_before_them():
    logits = log([[[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.9, 0.05, 0.05]]])
    ids = torch.tensor([[0, 1, 2]])
    assert token_logps(logits, ids).exp().tolist() == [pytest.approx([0.3, 0.7])]
    colder = token_logps(logits, ids, 0.5).exp().tolist()
    assert colder == [pytest.approx([0.09 / 0.38, 0.49 / 0.54])]
    message = told_by(ShapeError, token_logps, logits, ids[:, :2])
    assert message == "logits (1, 3, 3) do not fit ids (1, 2)"


def test_a_response_is_what_its_mask_says_in_any_type():
    logits = log([[[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.9, 0.05, 0.05]]] * 2)
    ids = torch.tensor([[0, 1, 2], [0, 1, 2]])
    for mask in (torch.tensor([[1, 1, 1], [0, 0, 2]]), torch.tensor([[1, 1, 1], [0, 0, 1]]) > 0):
        summed, n_tokens = response_logps(logits, ids, mask)
        # Nothing predicts the first token, so it does not count.
        assert summed.exp().tolist() == pytest.approx([0.3 * 0.7, 0.7])
        assert n_tokens.tolist() == [2.0, 1.0]


FIRST = ([9, 1, 2, 3], [0, 0, 1, 1])
OTHERS = {
    "same": ([9, 4, 5, 6], [0, 1, 1, 1]),
    "shorter": ([9, 5, 6, 6], [0, 1, 1, 0]),
    "different": ([9, 4, 7, 8], [0, 1, 1, 1]),
    "without a prompt": ([4, 8, 5, 6], [1, 0, 1, 1]),
}


def two_rows(second):
    """Ids and response mask of two rows of one side, the second of `OTHERS`."""
    return [torch.tensor(rows) for rows in zip(FIRST, OTHERS[second], strict=True)]


@pytest.mark.parametrize(
    ("student", "teacher", "message"),
    [
        (
            "same",
            "shorter",
            "row 1: 3 response tokens for the student, 2 for the teacher: render both from the "
            "same response ids",
        ),
        (
            "same",
            "different",
            "row 1: token 5 of the student at 2 meets token 7 of the teacher at 2: render both "
            "from the same response ids",
        ),
        *(
            (*sides, "a response starts at position 0: no logits predict its first token")
            for sides in (("same", "without a prompt"), ("without a prompt", "same"))
        ),
    ],
)
def test_responses_that_cannot_be_paired_are_named_by_row_and_place(student, teacher, message):
    sides = (*two_rows(student), *two_rows(teacher))
    assert told_by(AlignmentError, align_responses, *sides) == message
    kept = align_responses(*sides, row_mask_B=torch.tensor([1, 0]))
    assert (kept.ids.tolist(), kept.rows.tolist(), len(kept)) == ([2, 3], [0, 0], 2)
    assert kept.student_positions.tolist() == kept.teacher_positions.tolist() == [2, 3]
