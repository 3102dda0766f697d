"""Our losses and gradients against numbers that the papers' own implementations produced."""

import pytest
import torch
from torch import Tensor

from tests.trainer.vectors import cases, tensor
from trainer.losses import (
    TAIDScheduler,
    dpo_loss,
    entropy_aware_opd_loss,
    generalized_jsd_loss,
    length_normalized_dpo_loss,
    sdpo_loss,
    sdpo_per_token,
    simpo_loss,
    taid_loss,
)
from trainer.losses.channels import VARIANTS, ReplayOptions, replay_per_pair
from trainer.losses.divergence import log_probs
from trainer.losses.logps import response_logps
from trainer.losses.sdpo import importance_weights

CASES = cases("vectors")


def leaf(file: str, name: str) -> Tensor:
    return tensor(file, name).requires_grad_()


def assert_matches(loss: Tensor, expected: float, logits: Tensor, gradient: Tensor, tol: float):
    assert float(loss.detach()) == pytest.approx(expected, abs=tol)
    (grad,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(grad, gradient, atol=tol, rtol=tol)


JSD = [case for case in CASES["jsd_opsd_gkd"] if case["key"].startswith("b")]


@pytest.mark.parametrize("case", JSD, ids=lambda case: case["key"])
def test_generalized_jsd_matches_loss_gradient_and_entries(case):
    logits = leaf("jsd_opsd_gkd", "student_logits")
    teacher, labels = tensor("jsd_opsd_gkd", "teacher_logits"), tensor("jsd_opsd_gkd", "labels")
    options = {"beta": case["beta"], "temperature": case["temperature"], "top_k": case["top_k"]}
    loss = generalized_jsd_loss(logits, teacher, labels, **options)
    gradient = tensor("jsd_opsd_gkd", f"grad_{case['key']}")
    assert_matches(loss, case["batchmean"], logits, gradient, 1e-9)
    entries = generalized_jsd_loss(logits, teacher, **options, reduction="none")
    torch.testing.assert_close(
        entries.detach(), tensor("jsd_opsd_gkd", f"pointwise_{case['key']}"), atol=1e-9, rtol=1e-9
    )
    for clip, value in case["clipped_pointwise_batchmean"].items():
        clipped = generalized_jsd_loss(logits, teacher, labels, **options, token_clip=float(clip))
        assert float(clipped.detach()) == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize("reduction", ["sum", "mean", "batchmean"])
def test_generalized_jsd_reductions_without_labels(reduction):
    case = next(c for c in CASES["jsd_opsd_gkd"] if c["key"] == f"nolabels_{reduction}")
    value = generalized_jsd_loss(
        tensor("jsd_opsd_gkd", "student_logits"),
        tensor("jsd_opsd_gkd", "teacher_logits"),
        reduction=reduction,
    )
    assert float(value) == pytest.approx(case["value"], abs=1e-9)


@pytest.mark.parametrize("temperature", [1.0, 1.1])
def test_sampled_token_matches_the_policy_gradient_form(temperature):
    """OPSD's sampled-token variant: minus the detached log-ratio, times the student's log-prob."""
    case = next(c for c in CASES["jsd_opsd_gkd"] if c["key"] == f"tml_t{temperature}")
    student, teacher = (
        tensor("jsd_opsd_gkd", name) for name in ("student_logits", "teacher_logits")
    )
    labels = tensor("jsd_opsd_gkd", "labels")
    per_token = sdpo_per_token(
        student,
        teacher,
        ids_BT=labels.clamp_min(0),
        estimator="sampled",
        alpha=1.0,
        temperature=temperature,
    )
    value = per_token[labels != -100].mean()
    assert float(value) == pytest.approx(case["value"], abs=1e-9)


def sdpo_options(case: dict) -> dict:
    if not case["full_logit_distillation"]:
        return {"estimator": "sampled", "alpha": 1.0}
    estimator = "topk" if case["distillation_topk"] else "full"
    return {"estimator": estimator, "alpha": case["alpha"], "top_k": case["distillation_topk"] or 1}


@pytest.mark.parametrize("case", CASES["sdpo_lasgroup"], ids=lambda case: case["key"])
def test_sdpo_matches_the_authors_code(case):
    f = "sdpo_lasgroup"
    logits = leaf(f, "student_logits")
    mask = tensor(f, "response_mask") * tensor(f, "self_distillation_mask")[:, None]
    loss = sdpo_loss(
        logits,
        tensor(f, "teacher_logits"),
        mask,
        ids_BT=tensor(f, "ids"),
        old_logps_BT=tensor(f, "old_log_probs"),
        is_clip=case["is_clip"],
        aggregation=case["loss_agg_mode"],
        add_tail=case["add_tail"],
        **sdpo_options(case),
    )
    assert_matches(loss, case["loss"], logits, tensor(f, f"grad_{case['key']}"), 1e-7)


UPSTREAM = cases("sdpo_upstream")["cases"]


@pytest.mark.parametrize("key", UPSTREAM)
def test_sdpo_matches_the_authors_code_on_a_larger_vocabulary(key):
    case, f = UPSTREAM[key], "sdpo_upstream"
    logits = leaf(f, f"{key}/student_logits")
    mask = tensor(f, f"{key}/response_mask") * tensor(f, f"{key}/self_distillation_mask")[:, None]
    loss = sdpo_loss(
        logits,
        tensor(f, f"{key}/teacher_logits"),
        mask,
        ids_BT=tensor(f, f"{key}/token_ids"),
        old_logps_BT=tensor(f, f"{key}/old_log_probs"),
        is_clip=case["is_clip"],
        aggregation=case["mode"],
        add_tail=case["distillation_add_tail"],
        **sdpo_options(case),
    )
    expected = float(tensor(f, f"{key}/loss"))
    # Gradients are kept in float32: what is compared is float64 against its rounded twin.
    assert_matches(loss, expected, logits, tensor(f, f"{key}/grad").double(), 1e-7)


def test_no_case_of_the_larger_vocabulary_is_left_out():
    """Every variant of the authors' code is ours as well; a case that is not would be named here."""
    assert len(UPSTREAM) == 64
    variants = {(c["distillation_topk"], c["distillation_add_tail"]) for c in UPSTREAM.values()}
    assert variants == {(None, False), (6, True), (6, False)}
    assert {c["alpha"] for c in UPSTREAM.values()} == {0.0, 0.1, 0.5, 0.9, 1.0}
    assert {c["is_clip"] for c in UPSTREAM.values()} == {None, 2.0}
    assert {c["topk_from"] for c in UPSTREAM.values()} == {None, "student"}


INPUTS = ("student_logits", "teacher_logits", "ids", "old_log_probs")


@pytest.mark.parametrize("name", [n for n in CASES["sdpo_trl_per_token"] if n not in INPUTS])
def test_sdpo_matches_trl_per_token(name):
    f = "sdpo_trl_per_token"
    logits, teacher, ids = (tensor(f, n) for n in ("student_logits", "teacher_logits", "ids"))
    if name in ("sampled_token", "is_clipped2_sampled"):
        values = sdpo_per_token(logits, teacher, ids_BT=ids, estimator="sampled", alpha=1.0)
        if name == "is_clipped2_sampled":
            logps = log_probs(logits).gather(-1, ids[..., None]).squeeze(-1)
            values = values * importance_weights(logps, tensor(f, "old_log_probs"), max_ratio=2.0)
    else:
        support, alpha, *tail = name.split("_")
        values = sdpo_per_token(
            logits,
            teacher,
            estimator="full" if support == "full" else "topk",
            alpha=float(alpha[1:]),
            top_k=4,
            add_tail=tail == ["tail1"],
        )
    torch.testing.assert_close(values, tensor(f, name), atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("t", [0.0, 0.1, 0.4, 0.5, 0.9, 1.0])
def test_taid_loss_matches_the_authors_code(t):
    expected = next(c["loss"] for c in CASES["taid_loss"] if c.get("t") == t)
    logits = leaf("taid_loss", "student_logits")
    loss = taid_loss(
        logits, tensor("taid_loss", "teacher_logits"), tensor("taid_loss", "mask"), t=t
    )
    assert_matches(loss, expected, logits, tensor("taid_loss", f"grad_t{t}"), 1e-6)


@pytest.mark.parametrize("name", CASES["taid_scheduler"])
def test_taid_scheduler_follows_the_authors_trace(name):
    case = CASES["taid_scheduler"][name]
    scheduler = TAIDScheduler(case["num_train_steps"], **case["params"])
    for row in case["trace"]:
        step = scheduler.update_t(row["loss"], row["step"])
        assert scheduler.t == pytest.approx(row["t"], abs=2e-6)
        assert scheduler.state_dict()["momentum"] == pytest.approx(row["momentum"], abs=1e-6)
        if row["delta_t"] is not None:
            assert step == pytest.approx(row["delta_t"], abs=2e-6)


@pytest.mark.parametrize("case", cases("eopd_spec"), ids=lambda c: c["key"])
def test_entropy_aware_opd_matches_its_formula(case):
    f = "eopd_spec"
    logits, mask, ids = leaf(f, "student_logits"), tensor(f, "mask"), tensor(f, "ids")
    options = (
        {"mode": "soft", "h_max": case["h_max"]}
        if "h_max" in case
        else {
            "mode": "additive",
            "entropy_threshold": case["tau"],
            "alpha": case["alpha"],
            "top_k": case["topk"],
            "old_logps": tensor(f, "old_log_probs"),
        }
    )
    loss = entropy_aware_opd_loss(
        logits,
        tensor(f, "teacher_logits"),
        labels=ids.masked_fill(mask == 0, -100),
        **options,
    )
    assert_matches(loss, case["loss"], logits, tensor(f, f"grad_{case['key']}"), 1e-9)


SIMPO = [c for c in CASES["simpo"] if c["loss_type"] == "sigmoid" and not c["label_smoothing"]]


@pytest.mark.parametrize("case", SIMPO, ids=lambda case: case["key"])
def test_simpo_matches_the_authors_code(case):
    logits, labels = leaf("simpo", "logits"), tensor("simpo", "labels")
    summed, n_tokens = response_logps(logits, labels.clamp_min(0), labels != -100)
    averages = summed / n_tokens
    torch.testing.assert_close(averages.detach(), tensor("simpo", "avg_logps"), atol=1e-8, rtol=0)
    chosen, rejected = averages.chunk(2)
    assert case["gamma"] == pytest.approx(case["gamma_beta_ratio"] * case["beta"])
    loss = simpo_loss(chosen, rejected, beta=case["beta"], gamma=case["gamma"])
    expected = sum(case["losses"]) / len(case["losses"])
    assert_matches(loss, expected, logits, tensor("simpo", f"grad_{case['key']}"), 1e-8)


OUR_DPO = {"sigmoid": dpo_loss, "sigmoid_norm": length_normalized_dpo_loss}
DPO = [
    case
    for case in CASES["dpo_trl116"]
    if case["loss_type"] in OUR_DPO and not (case["use_weighting"] or case["label_smoothing"])
]


def logps_of_pairs(f: str) -> tuple:
    """Return the policy's logits, and of each side its log-probability, length, and reference."""
    logits, ids, mask = (
        leaf(f, "policy_logits"),
        tensor(f, "input_ids"),
        tensor(f, "completion_mask"),
    )
    summed, n_tokens = response_logps(logits, ids, mask)
    reference, _ = response_logps(tensor(f, "ref_logits"), ids, mask)
    return logits, summed, n_tokens, reference


@pytest.mark.parametrize("case", DPO, ids=lambda case: case["key"])
def test_dpo_matches_trl(case):
    f = "dpo_trl116"
    logits, summed, n_tokens, reference = logps_of_pairs(f)
    if case["loss_type"] == "sigmoid_norm":
        summed, reference = summed / n_tokens, reference / n_tokens
    sides = (*summed.chunk(2), *reference.chunk(2))
    loss = OUR_DPO[case["loss_type"]](*sides, beta=case["beta"])
    assert_matches(loss, case["loss"], logits, tensor(f, f"grad_{case['key']}"), 1e-8)


OTHERS = [case for case in CASES["dpo_trl116"] if case["loss_type"] in VARIANTS]


def test_no_variant_of_trls_is_left_out():
    assert {case["loss_type"] for case in OTHERS} == {*VARIANTS} - {"dpo", "dpo_norm", "simpo"}


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case["key"])
def test_other_preference_losses_match_trl(case):
    f = "dpo_trl116"
    logits, summed, n_tokens, reference = logps_of_pairs(f)
    smoothing = {"label_smoothing": case["label_smoothing"]} if case["label_smoothing"] else {}
    options = ReplayOptions(variant=case["loss_type"], dpo_beta=case["beta"], **smoothing)
    sides = (*summed.chunk(2), *n_tokens.chunk(2), *reference.chunk(2))
    loss = replay_per_pair(*sides, options).mean()
    assert_matches(loss, case["loss"], logits, tensor(f, f"grad_{case['key']}"), 1e-8)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_likelihood_beside_a_preference_loss_matches_trls_sft(variant):
    """TRL means it over the tokens of all chosen sides, we over each side's own, as the paper does."""
    f = "dpo_trl116"
    (case,) = (case for case in CASES[f] if case["loss_type"] == "sft")
    logits, ids, mask = (
        leaf(f, "policy_logits"),
        tensor(f, "input_ids"),
        tensor(f, "completion_mask"),
    )
    summed, n_tokens = response_logps(logits, ids, mask)
    reference, _ = response_logps(tensor(f, "ref_logits"), ids, mask)
    sides = (*summed.chunk(2), *n_tokens.chunk(2), *reference.chunk(2))
    alone, both = (
        replay_per_pair(*sides, ReplayOptions(variant=variant, rpo_alpha=weight))
        for weight in (0.0, 0.5)
    )
    n_chosen = n_tokens.chunk(2)[0]
    loss = 2 * ((both - alone) * n_chosen).sum() / n_chosen.sum()
    assert_matches(loss, case["loss"], logits, tensor(f, f"grad_{case['key']}"), 1e-8)
