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
    simpo_loss,
    taid_loss,
)
from trainer.losses.channels import (
    VARIANTS,
    ReplayOptions,
    SDPOOptions,
    distillation_per_token,
    replay_per_pair,
)
from trainer.losses.divergence import log_probs
from trainer.losses.logps import response_logps

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
    sides = (tensor("jsd_opsd_gkd", name) for name in ("student_logits", "teacher_logits"))
    labels = tensor("jsd_opsd_gkd", "labels")
    options = SDPOOptions(estimator="sampled", temperature=temperature)
    per_token = distillation_per_token(*sides, labels.clamp_min(0), options)
    assert float(per_token[labels != -100].mean()) == pytest.approx(case["value"], abs=1e-9)


def sdpo_options(case: dict) -> SDPOOptions:
    if not case["full_logit_distillation"]:
        return SDPOOptions(estimator="sampled")
    top_k = case["distillation_topk"]
    return SDPOOptions(
        estimator="topk" if top_k else "full", jsd_beta=case["alpha"], top_k=top_k or None
    )


def aggregated(values, mask, how):
    lengths = mask.sum(-1)
    sums = (values * mask).sum(-1)
    if how == "token-mean":
        return sums.sum() / lengths.sum()
    if how == "seq-mean-token-mean":
        sums = sums / lengths.clamp_min(1)
    return sums.sum() / (lengths > 0).sum()


SDPO = [("sdpo_lasgroup", "", case) for case in CASES["sdpo_lasgroup"]]
SDPO += [
    ("sdpo_upstream", f"{key}/", case | {"key": key})
    for key, case in cases("sdpo_upstream")["cases"].items()
]


def has_the_rest(case):
    return case["add_tail" if "add_tail" in case else "distillation_add_tail"]


# In ours, the rest of the vocabulary is always one more entry.
SDPO = [one for one in SDPO if not one[2]["distillation_topk"] or has_the_rest(one[2])]


@pytest.mark.parametrize(("f", "at", "case"), SDPO, ids=[case["key"] for _, _, case in SDPO])
def test_sdpo_matches_the_authors_code(f, at, case):
    logits, ids = (
        leaf(f, f"{at}student_logits"),
        tensor(f, f"{at}token_ids" if at else "ids"),
    )
    mask = tensor(f, f"{at}response_mask") * tensor(f, f"{at}self_distillation_mask")[:, None]
    values = distillation_per_token(
        logits, tensor(f, f"{at}teacher_logits"), ids, sdpo_options(case)
    )
    if case["is_clip"] is not None:
        logps = log_probs(logits).gather(-1, ids[..., None]).squeeze(-1)
        ratio = (logps - tensor(f, f"{at}old_log_probs")).detach().clamp(-20, 20).exp()
        values = values * ratio.clamp(max=case["is_clip"])
    loss = aggregated(values, mask, case["mode"] if at else case["loss_agg_mode"])
    expected = float(tensor(f, f"{at}loss")) if at else case["loss"]
    # Gradients of the larger file are kept in float32.
    gradient = tensor(f, f"{at}grad" if at else f"grad_{case['key']}").double()
    assert_matches(loss, expected, logits, gradient, 1e-7)


def test_no_case_of_the_authors_is_left_out_but_those_without_the_rest():
    assert len(SDPO) == 42 + 44


INPUTS = ("student_logits", "teacher_logits", "ids", "old_log_probs")
TRL_SDPO = [n for n in CASES["sdpo_trl_per_token"] if n not in INPUTS and not n.endswith("tail0")]


@pytest.mark.parametrize("name", [n for n in TRL_SDPO if n != "is_clipped2_sampled"])
def test_sdpo_matches_trl_per_token(name):
    f = "sdpo_trl_per_token"
    if name == "sampled_token":
        options = SDPOOptions(estimator="sampled")
    else:
        support, alpha, *_ = name.split("_")
        is_full = support == "full"
        options = SDPOOptions(
            estimator="full" if is_full else "topk",
            jsd_beta=float(alpha[1:]),
            top_k=None if is_full else 4,
        )
    logits, teacher, ids = (tensor(f, n) for n in ("student_logits", "teacher_logits", "ids"))
    values = distillation_per_token(logits, teacher, ids, options)
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


DPO = [
    case
    for case in CASES["dpo_trl116"]
    if case["loss_type"] in ("sigmoid", "sigmoid_norm")
    and not (case["use_weighting"] or case["label_smoothing"])
]


def logps_of_pairs(f: str) -> tuple:
    """Return the policy's logits, and of each side its log-probability, length, and reference."""
    ids, mask = tensor(f, "input_ids"), tensor(f, "completion_mask")
    logits = leaf(f, "policy_logits")
    summed, n_tokens = response_logps(logits, ids, mask)
    reference, _ = response_logps(tensor(f, "ref_logits"), ids, mask)
    return logits, summed, n_tokens, reference


@pytest.mark.parametrize("case", DPO, ids=lambda case: case["key"])
def test_dpo_matches_trl(case):
    f = "dpo_trl116"
    logits, summed, n_tokens, reference = logps_of_pairs(f)
    if case["loss_type"] == "sigmoid_norm":
        summed, reference = summed / n_tokens, reference / n_tokens
    loss = dpo_loss(*summed.chunk(2), *reference.chunk(2), beta=case["beta"])
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
    logits, summed, n_tokens, reference = logps_of_pairs(f)
    sides = (*summed.chunk(2), *n_tokens.chunk(2), *reference.chunk(2))
    alone, both = (
        replay_per_pair(*sides, ReplayOptions(variant=variant, rpo_alpha=weight))
        for weight in (0.0, 0.5)
    )
    n_chosen = n_tokens.chunk(2)[0]
    loss = 2 * ((both - alone) * n_chosen).sum() / n_chosen.sum()
    assert_matches(loss, case["loss"], logits, tensor(f, f"grad_{case['key']}"), 1e-8)
