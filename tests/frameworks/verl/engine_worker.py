"""One rank of VeRL's real engine with the plug-in, in process; compares the gradient with the core.

`torchrun` or plain python: writes what it saw as JSON.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from verl import DataProto
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    ActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

from trainer.engines.handover import TokenizedPairs
from trainer.engines.verl.engine import TEACHER_COLUMNS, ComposerEngine
from trainer.engines.verl.losses import NOT_SCORED
from trainer.engines.verl.options import current_options
from trainer.errors import DatasetError
from trainer.losses.channels import distillation_per_token, replay_per_pair
from trainer.losses.logps import response_logps

B, P, R, STEPS = 4, 8, 8, 3
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def make_worker(model: str) -> TrainingWorker:
    fp32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=model,
            use_remove_padding=False,
            override_config={"attn_implementation": "sdpa"},
        ),
        engine_config=FSDPEngineConfig(
            forward_only=False,
            fsdp_size=WORLD,
            strategy="fsdp2",
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=1,
            infer_micro_batch_size_per_gpu=2,
            use_torch_compile=False,
            model_dtype="fp32",
            mixed_precision=fp32,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
        checkpoint_config=None,
    )
    worker = TrainingWorker(config)
    worker.reset()
    return worker


class Rollouts:
    """A batch as the agent loop would leave it: ragged, some rows without a hint."""

    def __init__(self, vocabulary: int, top_k: int, hf):
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(5, vocabulary, (B, P + R), generator=generator)
        self.mask = torch.ones_like(self.ids)
        self.mask[1, :3] = 0
        self.mask[2, -2:] = 0
        self.positions = (self.mask.cumsum(-1) - 1).clamp_min(0)
        self.response_mask = self.mask[:, P:].float()
        noise = torch.randn(B, P + R, vocabulary, generator=generator)
        with torch.no_grad():
            logits = self.logits(hf)
            self.old = logits[:, P - 1 : -1].log_softmax(-1)
            self.old = self.old.gather(-1, self.ids[:, P:, None])[..., 0]
            self.teacher_logits = logits * 1.5 + noise
        logps, ids = self.teacher_logits.log_softmax(-1).topk(top_k, -1)
        self.hinted = torch.tensor([True, True, True, False])
        is_about_response = torch.zeros(B, P + R, dtype=torch.bool)
        is_about_response[:, P - 1 : -1] = True
        is_scored = is_about_response & self.hinted[:, None]
        self.teacher_ids = torch.where(is_scored[..., None], ids, NOT_SCORED).int()
        self.teacher_logprobs = torch.where(is_scored[..., None], logps, 0.0)
        self.advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])[:, None].expand(B, R).clone()

    def logits(self, hf):
        return hf(self.ids, attention_mask=self.mask, position_ids=self.positions).logits

    def part(self):
        rows = slice(RANK * B // WORLD, (RANK + 1) * B // WORLD)
        columns = {
            "input_ids": self.ids,
            "prompts": self.ids[:, :P],
            "attention_mask": self.mask,
            "position_ids": self.positions,
            "responses": self.ids[:, P:],
            "response_mask": self.mask[:, P:],
            "old_log_probs": self.old,
            "advantages": self.advantages,
            "teacher_ids": self.teacher_ids,
            "teacher_logprobs": self.teacher_logprobs,
        }
        columns = {name: value[rows] for name, value in columns.items()}
        batch = DataProto.from_single_dict(columns, meta_info={"temperature": 1.0})
        data = left_right_2_no_padding(batch.to_tensordict())
        tu.assign_non_tensor(
            data,
            global_batch_size=B,
            global_token_num=self.mask[rows].sum(-1).tolist(),
            use_remove_padding=False,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=1,
            use_fused_kernels=False,
        )
        return data


def core_loss(hf, rollouts: Rollouts, options, pairs: TokenizedPairs, initial):
    """The three channels on a plain transformers model, by the loss core alone."""
    logits = rollouts.logits(hf)[:, P - 1 : -1]
    ids, mask = rollouts.ids[:, P:], rollouts.response_mask
    logps = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    ratio, advantage = (logps - rollouts.old).exp(), rollouts.advantages
    gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    policy = -(gain * mask).sum() / mask.sum()
    counted = (mask > 0) & rollouts.hinted[:, None]
    teacher = rollouts.teacher_logits[:, P - 1 : -1]
    per_token = distillation_per_token(
        logits[counted], teacher[counted], ids[counted], options.sdpo_at(0)
    )
    drawn = pairs.sampler(batch_size=options.pairs_per_step, seed=options.seed).step(0)
    batch = pairs.tensors(drawn)
    n_prompt = batch["prompts"].size(1)
    response = torch.cat([torch.zeros_like(batch["prompts"]), batch["response_mask"]], dim=1)

    def sums(model):
        out = model(
            batch["input_ids"],
            attention_mask=batch["attention_mask"],
            position_ids=batch["position_ids"],
        )
        return response_logps(out.logits, batch["input_ids"], response)

    assert n_prompt > 0
    scored, lengths = sums(hf)
    with torch.no_grad():
        reference, _ = sums(initial)
    losses = replay_per_pair(
        scored[0::2],
        scored[1::2],
        lengths[0::2],
        lengths[1::2],
        reference[0::2],
        reference[1::2],
        options.preference,
    )
    weights = torch.tensor([pairs.rows[i]["weight"] for i in drawn])
    replay = (losses * weights).sum() / weights.sum()
    return (
        options.policy_weight * policy
        + options.alpha_sdpo * per_token.mean()
        + options.beta_replay * replay
    )


def relative_error(module, hf) -> float:
    """Of the whole gradient: norm of the difference over the norm."""
    theirs = dict(hf.named_parameters())
    difference = norm = 0.0
    for name, parameter in module.named_parameters():
        grad = parameter.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        expected = theirs[name].grad
        difference += float((grad - expected).double().pow(2).sum())
        norm += float(expected.double().pow(2).sum())
    return (difference / norm) ** 0.5


def main(model: str, out: str) -> None:
    worker = make_worker(model)
    options = current_options()
    hf, initial = (
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval() for _ in range(2)
    )
    pairs = TokenizedPairs(options.pairs)
    rollouts = Rollouts(hf.config.vocab_size, options.top_k, hf)
    loss = partial(
        ppo_loss, config=ActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    )
    engine = worker.engine
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(rollouts.part(), loss)
        core_loss(hf, rollouts, options, pairs, initial).backward()
        error = relative_error(engine.module, hf)
    worker.set_loss_fn(loss)
    history = []
    for _ in range(STEPS):
        done = worker.train_batch(rollouts.part())
        metrics = tu.get(done, "metrics")
        history.append(
            {
                name: float(np.mean(value))  # one entry for each rank, all the same
                for name, value in metrics.items()
                if name.startswith(("sdpo/", "replay/"))
            }
        )
    without_teacher = rollouts.part()
    for name in TEACHER_COLUMNS:
        without_teacher.pop(name)
    try:
        worker.train_batch(without_teacher)
        refusal = ""
    except DatasetError as refused:
        refusal = str(refused)
    if RANK == 0:
        seen = {
            "refusal": refusal,
            "engine": type(engine).__name__,
            "is_ours": isinstance(engine, ComposerEngine),
            "world": WORLD,
            "relative_error": error,
            "history": history,
            "steps": engine.optimizer_steps(),
        }
        Path(out).write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
