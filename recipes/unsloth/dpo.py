"""Channel 3 on the published pairs in Unsloth: adapters, with TRL's trainer underneath.

    python recipes/unsloth/dpo.py --model unsloth/Qwen3-0.6B --output out/unsloth

reads what `replay-pipeline publish --format unsloth` writes.
"""

import argparse
import json
from pathlib import Path

from unsloth import FastLanguageModel  # isort: skip - it patches the others, so it comes first
from datasets import load_dataset
from trl import DPOConfig, DPOTrainer


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="unsloth/Qwen3-0.6B")
    parser.add_argument("--data", default="data/exports/unsloth/train.jsonl")
    parser.add_argument("--output", default="out/unsloth")
    parser.add_argument("--max-length", type=int, default=8192, help="of the pairs, when cut")
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--accumulate", type=int, default=8)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    model, tokenizer = FastLanguageModel.from_pretrained(
        options.model, max_seq_length=options.max_length, load_in_4bit=False
    )
    model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=32)
    pairs = load_dataset("json", data_files=options.data, split="train")
    trainer = DPOTrainer(
        model=model,
        args=DPOConfig(
            output_dir=options.output,
            # TRL's default of 1,024 drops pairs whose prompt is longer.
            max_length=options.max_length,
            max_steps=options.max_steps,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=options.accumulate,
            learning_rate=5e-6,
            logging_steps=1,
            report_to=[],
        ),
        train_dataset=pairs,
        processing_class=tokenizer,
    )
    n_used = len(trainer.train_dataset)
    done = trainer.train()
    trainer.save_model(options.output)
    report = {"rows": len(pairs), "used": n_used, "steps": done.global_step}
    report |= {"loss": done.training_loss}
    Path(options.output, "report.json").write_text(json.dumps(report), "utf-8")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
