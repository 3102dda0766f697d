"""Pairs of token ids through `trl.DPOTrainer`, as other benchmarks compare with it."""

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.measuring import spent_s

BETA = 0.1


def make_tokenizer(vocab: int, end: int) -> Any:
    """One word per token id, so that TRL's own tokenization gives the ids back.

    No word begins with another, since the end of a turn is looked for inside words as well.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{idx:06}": idx for idx in range(vocab)}
    backend = Tokenizer(models.WordLevel(words, unk_token="t000000"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="t000000", eos_token=f"t{end:06}"
    )


def run_trl(
    pairs: Sequence[tuple[list[int], list[int], list[int]]],
    make_model: Callable[..., Any],
    sizes: dict[str, Any],
    *,
    end: int,
    batch_size: int = 1,
    n_steps: int = 1,
    learning_rate: float = 0.0,
    **options: Any,
) -> dict[str, float]:
    """Steps of sigmoid DPO on all pairs; the figures of the first, the seconds of the fastest.

    `options` are more of `trl.DPOConfig`'s.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    taken_s = []
    device = sizes["device"]

    class StepSeconds(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began_s = spent_s(device)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            taken_s.append(spent_s(device) - self.began_s)

    tokenizer = make_tokenizer(sizes["vocab"], end)
    sides = ("prompt", "chosen", "rejected")
    rows = [
        {
            side: "".join(f" {word}" for word in tokenizer.convert_ids_to_tokens(ids))
            for side, ids in zip(sides, pair, strict=True)
        }
        for pair in pairs
    ]
    with tempfile.TemporaryDirectory() as folder:
        args = DPOConfig(
            output_dir=folder,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=len(rows) // batch_size,
            max_steps=n_steps,
            beta=BETA,
            max_length=None,
            learning_rate=learning_rate,
            lr_scheduler_type="constant",
            gradient_checkpointing=sizes.get("checkpointing", False),
            use_cpu=device == "cpu",
            bf16=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **options,
        )
        trainer = DPOTrainer(
            model=make_model(sizes),
            ref_model=None if sizes.get("lora_rank") else make_model(sizes, seed=1),
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[StepSeconds()],
        )
        before_s = spent_s(device)
        trainer.train()
        if device == "cpu":  # what precedes the only step belongs to it
            taken_s = [spent_s(device) - before_s]
    logged = trainer.state.log_history[0]
    return {"seconds": min(taken_s), "loss": logged["loss"], "grad_norm": logged["grad_norm"]}
