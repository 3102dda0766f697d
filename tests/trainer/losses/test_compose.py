"""One batch, three channels."""

import pytest
import torch

from trainer import build_batch, compose_loss
from trainer.data.collator import EXAMPLE_ROW
from trainer.errors import AlignmentError, TrainerConfigError
from trainer.losses import generalized_jsd_loss, simpo_loss
from trainer.losses.compose import _say_once, model_logits, pair_logps

ON = {"alpha_sdpo": 0.3, "beta_replay": 0.7}


@pytest.fixture
def batch(tokenizer, model):
    rows = [EXAMPLE_ROW, {**EXAMPLE_ROW, "hint": None, "weight": 3.0}]
    return build_batch(tokenizer, rows=rows, reference=model)


def test_the_total_is_the_weighted_sum_of_live_channels(model, batch):
    parts = compose_loss(model, batch, **ON)
    expected = parts.lm_ce + 0.3 * parts.sdpo_jsd + 0.7 * parts.trace_replay_dpo
    torch.testing.assert_close(parts.total, expected)
    assert parts.off == {}
    assert parts.metrics["loss/total"] == pytest.approx(float(expected.detach()))


def test_every_channel_reaches_the_weights(model, batch):
    norms = compose_loss(model, batch, with_gradient_norms=True, **ON).metrics
    for channel in ("policy", "sdpo", "replay"):
        assert norms[f"grad_norm/{channel}"] > 0


def test_channels_are_the_plain_losses_on_the_plain_tokens(model, batch):
    """Against the definitions, written out by hand for the one row with a hint."""
    parts = compose_loss(model, batch, dpo_variant="simpo", **ON)
    student = model_logits(model, batch["input_ids"], batch["attention_mask"])[0]
    hinted = model_logits(
        model, batch["ctx_teacher_input_ids"], batch["ctx_teacher_attention_mask"]
    )[0]
    n = int(batch["response_mask"][0].sum())
    ends = [int(batch[key][0].sum()) for key in ("attention_mask", "ctx_teacher_attention_mask")]
    jsd = generalized_jsd_loss(
        student[ends[0] - n - 1 : ends[0] - 1], hinted[ends[1] - n - 1 : ends[1] - 1].detach()
    )
    torch.testing.assert_close(parts.sdpo_jsd, jsd)
    assert parts.metrics["sdpo/n_tokens"] == n
    (chosen, n_chosen), (rejected, n_rejected) = pair_logps(model, batch)
    replay = simpo_loss(chosen / n_chosen, rejected / n_rejected, weight=torch.tensor([1.0, 3.0]))
    torch.testing.assert_close(parts.trace_replay_dpo, replay)
    logp = student.log_softmax(-1)[ends[0] - n - 1 : ends[0] - 1]
    ids = batch["input_ids"][0, ends[0] - n : ends[0]]
    cross_entropy = -logp.gather(-1, ids[:, None]).mean()
    torch.testing.assert_close(parts.lm_ce, cross_entropy, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", ["dpo", "dpo_norm", "simpo"])
@pytest.mark.parametrize("wrapper", ["none", "taid", "entropy_opd"])
def test_every_combination_has_a_gradient(model, batch, variant, wrapper):
    parts = compose_loss(model, batch, dpo_variant=variant, sdpo_wrapper=wrapper, taid_t=0.5, **ON)
    parts.total.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    assert parts.off == {}


def test_the_teacher_gets_no_gradient(model, batch, tokenizer):
    from trainer.data.tiny import make_model

    teacher = make_model(tokenizer, hidden_size=32, n_layers=1, n_heads=2, seed=3)
    parts = compose_loss(model, batch, teacher=teacher, **ON)
    parts.total.backward()
    assert all(p.grad is None for p in teacher.parameters())
    assert float(parts.sdpo_jsd.detach()) > 0


def test_padding_changes_nothing(model, batch):
    before = compose_loss(model, batch, dpo_variant="simpo", **ON)
    wide = {
        key: torch.nn.functional.pad(value, (0, 5)) if value.dim() == 2 else value
        for key, value in batch.items()
    }
    after = compose_loss(model, wide, dpo_variant="simpo", **ON)
    torch.testing.assert_close(after.total, before.total, atol=1e-5, rtol=1e-5)


def without(batch, *prefixes):
    return {k: v for k, v in batch.items() if not k.startswith(prefixes)}


@pytest.mark.parametrize(
    ("change", "options", "channel", "reason"),
    [
        ((), {"beta_replay": 1.0}, "sdpo", "alpha_sdpo is 0"),
        (("ctx_",), ON, "sdpo", "no ctx_teacher_input_ids"),
        ((), {"alpha_sdpo": 1.0}, "replay", "beta_replay is 0"),
        (("dpo_rejected",), ON, "replay", "no dpo_rejected_input_ids"),
        (("dpo_chosen_ref", "dpo_rejected_ref"), ON, "replay", "dpo_variant='simpo' needs none"),
    ],
)
def test_a_channel_without_weight_or_inputs_is_off_and_says_why_once(
    model, batch, caplog, change, options, channel, reason
):
    _say_once.cache_clear()
    smaller = without(batch, *change) if change else batch
    with caplog.at_level("INFO", logger="trainer"):
        compose_loss(model, smaller, **options)
        parts = compose_loss(model, smaller, **options)
    assert reason in parts.off[channel]
    value = {"sdpo": parts.sdpo_jsd, "replay": parts.trace_replay_dpo}[channel]
    assert float(value.detach()) == 0.0
    assert sum(reason in record.message for record in caplog.records) == 1


def test_a_batch_whose_rows_have_no_hint_leaves_channel_2_off(model, tokenizer):
    batch = build_batch(tokenizer, rows=[{**EXAMPLE_ROW, "hint": None}], reference=model)
    parts = compose_loss(model, batch, **ON)
    assert list(parts.off) == ["sdpo"]


def test_a_batch_that_counts_none_of_its_hints_leaves_channel_2_off(model, batch):
    none = torch.zeros_like(batch["response_mask"][:, 0])
    parts = compose_loss(model, {**batch, "sdpo_mask": none}, **ON)
    assert parts.off == {"sdpo": "no row of the batch has a hint"}


def test_simpo_needs_no_reference(model, batch):
    parts = compose_loss(
        model, without(batch, "dpo_chosen_ref", "dpo_rejected_ref"), dpo_variant="simpo", **ON
    )
    assert parts.off == {}


def test_a_shifted_teacher_response_is_refused(model, batch):
    batch["ctx_teacher_input_ids"] = batch["ctx_teacher_input_ids"].roll(1, dims=1)
    with pytest.raises(AlignmentError, match="of the student"):
        compose_loss(model, batch, **ON)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sdpo_wrapper": "taid"}, "needs taid_t"),
        ({"sdpo_wrapper": "taid", "taid_t": 1.2}, "taid_t=1.2"),
        ({"sdpo_wrapper": "best"}, "sdpo_wrapper='best'"),
        ({"dpo_variant": "best"}, "dpo_variant='best'"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"jsd_beta": 2.0}, "jsd_beta=2.0"),
    ],
)
def test_a_wrong_option_is_named(model, batch, options, message):
    with pytest.raises(TrainerConfigError, match=message):
        compose_loss(model, batch, **ON, **options)


def test_a_batch_without_ids_is_refused(model):
    with pytest.raises(TrainerConfigError, match="no input_ids"):
        compose_loss(model, {})


def test_labels_select_the_tokens_of_channel_1(model, batch):
    labels = batch["input_ids"].masked_fill(batch["response_mask"] == 0, -100)
    torch.testing.assert_close(
        compose_loss(model, {**batch, "labels": labels}).lm_ce, compose_loss(model, batch).lm_ce
    )
