"""GRPO with a verifiable reward on arithmetic word problems generated here.

    python recipes/gsm8k/run.py           # a tiny model of random weights, seconds on a CPU
    python recipes/gsm8k/run.py --real    # SmolLM2-135M (`make real-model`) with adapters, minutes

In the manner of GSM8K, and nothing of it: every item is made from a template and two numbers, so
the recipe needs no download. A model first learns the form of an answer from a few worked items
(cross-entropy), then GRPO, on its own samples, which answers are right.
"""

import argparse
import random
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback

from trainer import ComposerConfig, ComposerReplicationTrainer
from trainer.data.rendering import Renderer
from trainer.data.tiny import make_model, train_tokenizer
from trainer.model.loading import with_adapter
from trainer.settings import PeftOptions
from trainer.trl.run import without_upstream_warnings

TEMPLATES = (
    "{a} apples are in a basket, {b} more are put in. How many apples are there?",
    "A shelf holds {a} books and gets {b} more. How many books does it hold?",
    "Mia has {a} stamps, Ben gives her {b}. How many stamps has she got?",
)
MAX_TOKENS = 10
REAL = "build/real-model/smollm2-135m-instruct"


@dataclass(frozen=True)
class Sizes:
    """What a model of some size can learn, and how fast."""

    largest: int
    """Largest number in an item."""
    warm_up_steps: int
    grpo_steps: int
    batch_size: int
    """Answers sampled in a step, eight an item."""
    warm_up_rate: float
    grpo_rate: float


TINY = Sizes(
    largest=2, warm_up_steps=60, grpo_steps=80, batch_size=32, warm_up_rate=3e-3, grpo_rate=3e-3
)
PRETRAINED = Sizes(
    largest=2, warm_up_steps=15, grpo_steps=25, batch_size=16, warm_up_rate=1e-3, grpo_rate=2e-4
)


def items(seed: int, largest: int = TINY.largest) -> list[dict[str, Any]]:
    """Every template with every pair of numbers, shuffled."""
    numbers = range(1, largest + 1)
    rows = [
        {
            "prompt": [{"role": "user", "content": template.format(a=a, b=b)}],
            "answer": str(a + b),
        }
        for template in TEMPLATES
        for a in numbers
        for b in numbers
    ]
    random.Random(seed).shuffle(rows)
    return rows


def is_right(text: str, answer: str) -> bool:
    """Verifiable: the last number after `####` is the answer."""
    found = re.findall(r"####\s*(-?\d+)", text)
    return bool(found) and found[-1] == answer


def reward(
    completions: list[Any], completion_ids: list[list[int]], answer: list[str], **_: Any
) -> list[float]:
    """1 for the right number in an answer that ended by itself, else 0.

    Without the second condition the policy learns to go on after the number: reward, no answer.
    """
    return [
        float(is_right(completion[0]["content"], right) and len(ids) < MAX_TOKENS)
        for completion, ids, right in zip(completions, completion_ids, answer, strict=True)
    ]


def warm_up(model: Any, renderer: Renderer, rows: list[dict[str, Any]], sizes: Sizes) -> None:
    """Teach the form `#### number`, with numbers that are right for only part of the items."""
    rng = random.Random(0)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=sizes.warm_up_rate)
    for _ in range(sizes.warm_up_steps):
        loss = torch.zeros(())
        for row in rng.sample(rows, 4):
            right = rng.random() < 0.5
            number = row["answer"] if right else str(rng.randint(2, 2 * sizes.largest))
            prompt = renderer.prompt_ids(row["prompt"])
            answer = renderer.response_ids({"role": "assistant", "content": f"#### {number}"})
            logits = model(input_ids=torch.tensor([prompt + answer])).logits[0]
            predicted = logits[len(prompt) - 1 : -1]
            loss = loss + F.cross_entropy(predicted, torch.tensor(answer)) / 4
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def expected_accuracy(model: Any, renderer: Renderer, rows: list[dict[str, Any]]) -> float:
    """Probability of the right answer, averaged over the items: no sampling noise."""
    model.eval()
    total = 0.0
    for row in rows:
        prompt = renderer.prompt_ids(row["prompt"])
        answer = renderer.response_ids({"role": "assistant", "content": f"#### {row['answer']}"})
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0]
        logp = logits[len(prompt) - 1 : -1].log_softmax(-1)
        total += float(logp.gather(-1, torch.tensor(answer)[:, None]).sum().exp())
    return total / len(rows)


def tiny(rows: list[dict[str, Any]]) -> tuple[Any, Any]:
    """Make a tokenizer and a model of random weights."""
    torch.set_num_threads(1)  # products this small only lose by sharing
    texts = [row["prompt"][0]["content"] for row in rows] + [f"#### {n}" for n in range(30)]
    tokenizer = train_tokenizer(texts, vocab_size=400)
    return tokenizer, make_model(tokenizer, hidden_size=64, n_layers=2, n_heads=4)


def real(folder: str) -> tuple[Any, Any]:
    """Load a pretrained model with adapters on its last ten layers."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return tokenizer, with_adapter(model, PeftOptions(layers="last 10"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--real", nargs="?", const=REAL, metavar="FOLDER", help=f"default: {REAL}")
    folder = parser.parse_args(arguments).real
    sizes = PRETRAINED if folder else TINY
    started = time.process_time()
    torch.manual_seed(0)
    rows = items(seed=0, largest=sizes.largest)
    tokenizer, model = real(folder) if folder else tiny(rows)
    renderer = Renderer(tokenizer=tokenizer)
    warm_up(model, renderer, rows, sizes)
    before = expected_accuracy(model, renderer, rows)
    print(f"after the warm-up: {100 * before:.1f} % of the probability is on right answers")

    with tempfile.TemporaryDirectory() as folder, without_upstream_warnings():
        args = ComposerConfig(
            output_dir=folder,
            objective="grpo",
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            activation_checkpointing=False,
            per_device_train_batch_size=sizes.batch_size,
            num_generations=8,
            max_completion_length=MAX_TOKENS,
            learning_rate=sizes.grpo_rate,
            max_steps=sizes.grpo_steps,
        )
        trainer = ComposerReplicationTrainer(
            model,
            reward,
            args,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()

    after = expected_accuracy(model, renderer, rows)
    is_good = after >= before + 0.10
    print(f"after {sizes.grpo_steps} steps of GRPO: {100 * after:.1f} %")
    print(f"{'PASS' if is_good else 'FAIL'} in {time.process_time() - started:.0f} CPU-seconds")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
