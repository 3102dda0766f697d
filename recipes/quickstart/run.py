"""Three live channels on one batch, to -99 % loss: a tiny model, or a real one with adapters.

python recipes/quickstart/run.py           # random weights, seconds on a CPU
python recipes/quickstart/run.py --real    # SmolLM2-135M (`make real-model`), a minute
"""

import argparse
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer import build_batch, compose_loss
from trainer.data.collator import EXAMPLE_ROW
from trainer.data.tiny import corpus, make_model, train_tokenizer
from trainer.model.loading import with_adapter
from trainer.settings import PeftOptions

ALPHA_SDPO, BETA_REPLAY = 0.1, 0.05
MAX_STEPS = 200
REAL = "build/real-model/smollm2-135m-instruct"


def tiny() -> tuple[Any, Any]:
    """Make a tokenizer and a model of random weights."""
    print("1. a tokenizer and a tiny Qwen2, made on the spot")
    torch.set_num_threads(1)  # the products of a tiny model only lose by sharing
    tokenizer = train_tokenizer(corpus([EXAMPLE_ROW]), vocab_size=600)
    return tokenizer, make_model(tokenizer)


def real(folder: str) -> tuple[Any, Any]:
    """Load a pretrained model with adapters on its last ten layers."""
    print(f"1. {folder}, with adapters")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return tokenizer, with_adapter(model, PeftOptions(layers="last 10"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--real", nargs="?", const=REAL, metavar="FOLDER", help=f"default: {REAL}")
    folder = parser.parse_args(arguments).real
    torch.manual_seed(0)
    started = time.process_time()

    tokenizer, model = real(folder) if folder else tiny()
    trained = [p for p in model.parameters() if p.requires_grad]
    n_parameters = sum(p.numel() for p in model.parameters())
    print(f"   {n_parameters:,} parameters, {sum(p.numel() for p in trained):,} of them trained")

    print("2. one decision of a coding agent: what it did, what was better, and why")
    # The weights before the first step are the DPO reference.
    batch = build_batch(tokenizer, reference=model)

    print("3. total = cross-entropy + 0.1 self-distillation + 0.05 preference")
    optimizer = torch.optim.AdamW(trained, lr=2e-3 if folder else 1e-2, weight_decay=0.0)
    first = last = float("nan")
    for step in range(MAX_STEPS):
        loss = compose_loss(
            model,
            batch,
            alpha_sdpo=ALPHA_SDPO,
            beta_replay=BETA_REPLAY,
            with_gradient_norms=step == 0,
        )
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
        last = loss.metrics["loss/total"]
        if step == 0:
            first = last
            norms = {k: v for k, v in loss.metrics.items() if k.startswith("grad_norm/")}
            print("   gradient norms:", {k: round(v, 6) for k, v in norms.items()})
        if step % 20 == 0 or last <= 0.01 * first:
            print(
                f"   step {step:3d}  total {last:7.4f}  cross-entropy {loss.lm_ce.item():7.4f}"
                f"  self-distillation {loss.sdpo_jsd.item():.4f}"
                f"  preference {loss.trace_replay_dpo.item():.4f}"
            )
        if last <= 0.01 * first:
            break

    live = 3 - len(loss.off)
    fall = 100 * (1 - last / first)
    is_good = live == 3 and last <= 0.01 * first
    print(f"4. {live} channels live, loss fell by {fall:.1f} % in {step + 1} steps")
    print(f"5. {'PASS' if is_good else 'FAIL'} in {time.process_time() - started:.1f} CPU-seconds")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
