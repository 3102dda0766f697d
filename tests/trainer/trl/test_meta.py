"""One step of all channels on the `meta` device: what a GPU would refuse, found without one.

There a tensor of another device in an operation, `.item()`, `bool()`, `tolist()` and `nonzero()` all
raise; shapes and the way back are real. TRL's own loss reads its figures from the device, so a
surrogate of the same inputs stands in for it.
"""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import masking_utils
from trl.trainer.grpo_trainer import GRPOTrainer

from trainer.model import packing, tree_attention
from trainer.trl import pairs as pairs_module

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning"),
]
META = torch.device("meta")
BACKENDS = {
    "flash": tree_attention.FlashTreeAttention,
    "flex": tree_attention.FlexAttention,
}


def surrogate(trainer, model, inputs):
    """The policy's loss from the numbers that TRL asks of us."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    n = inputs["completion_ids"].size(1)
    logps, _, _ = trainer._get_per_token_logps_and_entropies(model, ids, mask, n)
    ratio = (logps - inputs["old_per_token_logps"]).exp()
    return -(ratio * inputs["advantages"][:, None] * inputs["completion_mask"]).mean()


def flex_kernel(query, key, value, *, block_mask, **_options):
    """What stands for FlexAttention, which refuses the device: its inputs, and its mask by blocks."""
    assert block_mask.kv_num_blocks.device == block_mask.kv_indices.device == query.device
    return query + (key.sum() + value.sum()) * block_mask.kv_num_blocks.sum()


def on_meta(inputs):
    """What lies on the device in a step, there; what lies on the host, as it is."""
    stays = ("host_", "n_sdpo_tokens", "sdpo_mask", "teacher_prompt")
    return {
        name: value.to(META)
        if isinstance(value, torch.Tensor) and not name.startswith(stays)
        else value
        for name, value in inputs.items()
    }


@pytest.fixture(autouse=True)
def _has_no_autocast(monkeypatch):
    """TRL's kernels ask for the autocast of their device, which this one has not."""
    is_enabled = torch.is_autocast_enabled
    monkeypatch.setattr(
        torch, "is_autocast_enabled", lambda *kind: kind != ("meta",) and is_enabled(*kind)
    )


@pytest.fixture
def step(composer, model, monkeypatch):
    """A function that makes one step on `meta`, and returns the trained parameters' gradients."""

    def one_step(*, attention="sdpa", backend="flash", is_lora=True, **settings):
        own = copy.deepcopy(model)
        own.set_attn_implementation(attention)
        if is_lora:
            names = ["q_proj", "v_proj", "down_proj"]
            own = get_peft_model(own, LoraConfig(r=4, target_modules=names, task_type="CAUSAL_LM"))
        trainer = composer(
            model=own,
            alpha_sdpo=0.5,
            beta_replay=0.7,
            dpo_variant="dpo",
            drift_weight=0.5,
            drift_tokens=32,
            pair_forward="packed",
            **settings,
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
        assert float(inputs["n_sdpo_tokens"]) > 0
        trainer.model.to(META)
        if trainer.teacher is not None and trainer.teacher.copy is not None:
            trainer.teacher.copy.to(META)
        if trainer.drift._untouched.copy is not None:
            trainer.drift._untouched.copy.to(META)
        with monkeypatch.context() as patch:
            patch.setattr(type(trainer.accelerator), "device", property(lambda _: META))
            patch.setattr(GRPOTrainer, "_compute_loss", surrogate)
            # Where it makes a mask, transformers itself looks at padding and positions.
            patch.setattr(masking_utils, "fast_all", lambda _mask: True)
            patch.setattr(masking_utils, "find_packed_sequence_indices", lambda _positions: None)
            patch.setattr(tree_attention, "flex_attention", flex_kernel)
            patch.setattr(packing, "attention_for", BACKENDS[backend])
            loss = trainer._compute_loss(trainer.model, on_meta(inputs))
            assert loss.device.type == "meta"
            loss.backward()
        return {n: p.grad for n, p in trainer.model.named_parameters() if p.requires_grad}

    return one_step


@pytest.mark.parametrize(
    ("attention", "backend"),
    [("sdpa", "flash"), ("eager", "flash"), ("sdpa", "flex")],
)
def test_a_step_of_adapters_stays_on_its_device(step, attention, backend):
    gradients = step(attention=attention, backend=backend)
    assert all("lora_" in name for name in gradients)
    assert all(one is not None and one.device.type == "meta" for one in gradients.values())


@pytest.mark.parametrize(
    "settings",
    [
        {"teacher": "ema"},
        {"teacher": "live"},
        {"teacher": "live", "share_prefixes": False},
        {"share_prefixes": False, "head": "reference"},
        {"max_packed_tokens": 1},
    ],
)
def test_a_step_in_full_stays_on_its_device(step, settings):
    assert all(one is not None for one in step(is_lora=False, **settings).values())


def test_a_tensor_of_the_cpu_in_a_pass_is_found(step, monkeypatch):
    original = pairs_module.replay_per_pair
    monkeypatch.setattr(
        pairs_module,
        "replay_per_pair",
        lambda chosen, *rest: original(chosen, *rest) + torch.ones(4),
    )
    with pytest.raises(RuntimeError, match="meta"):
        step()


def test_a_wait_for_the_device_in_a_pass_is_found(step, monkeypatch):
    original = pairs_module.replay_per_pair
    monkeypatch.setattr(
        pairs_module,
        "replay_per_pair",
        lambda chosen, *rest: original(chosen, *rest) * chosen.sum().item(),
    )
    with pytest.raises(RuntimeError, match=r"meta"):
        step()
