"""Measure how a model acts: its greedy actions at held-out states, and its loss on plain text.

Preference accuracy only compares two given actions. A model can get better at that and worse at
writing either of them. So both are measured on the same states, before and after training.
"""

import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata
from pydoc_data.topics import topics
from typing import Any

import torch

from trainer.data.rendering import Renderer
from trainer.data.rewards import agreement, as_message
from trainer.data.types import Message, PromptRow

Agreement = Callable[[Message, Message], str | None]

SAME = frozenset({"exact", "effect"})
"""Levels at which an action counts as the consensus action. The same tool on another file does not."""
SURE = 0.05
"""One-sided error probability at which a model counts as acting worse."""
SURE_LEARNED = 0.01
"""One-sided error probability at which a model counts as having learned. It is stricter, so that
random labels don't pass by luck on correlated states."""
MAX_GENERAL_RISE = 0.1
"""Relative rise of the loss on general text above which a report warns of lost language."""
_N_TEXTS, _TEXT_TOKENS = 12, 128
BATCH_ROWS, BATCH_TOKENS = 16, 16_384
"""Most prompts that are continued at once, and most of their tokens with padding."""
_DESCRIBED = (
    *("accelerate", "datasets", "httpx", "huggingface_hub", "numpy", "peft", "pyarrow"),
    *("safetensors", "tokenizers", "torch", "tqdm", "transformers", "trl"),
)
"""Packages whose descriptions a model is held to."""


@torch.no_grad()
def consensus_rate(
    model: Any,
    renderer: Renderer,
    rows: Sequence[PromptRow],
    *,
    level: Agreement = agreement,
    max_new_tokens: int = 64,
    on_acted: Callable[[int], object] = lambda _n: None,
) -> dict[str, Any]:
    """Measure the greedy actions at held-out states, and report each one to `on_acted`.

    Returns:
        The share of states by level of agreement with the consensus. `same` is the share of those
        whose action is the consensus action, which is level `exact` or `effect`. `valid` is
        the share of well-formed calls at states where the consensus is a call. `n` and `n_calls`
        count the states of both shares. `agreed` and `valid_at` give the same per state, and `acts`
        the written actions.
    """
    prompts = [renderer.row_prompt_ids(row) for row in rows]
    tokenizer: Any = renderer.tokenizer
    written = greedy_ids(
        model, tokenizer, prompts, max_new_tokens=max_new_tokens, on_acted=on_acted
    )
    levels: Counter[str] = Counter()
    agreed: list[bool] = []
    valid_at: list[bool] = []
    acts: list[dict[str, Any]] = []
    for row, prompt, ids in zip(rows, prompts, written, strict=True):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        action = _action(tokenizer, prompt, ids, text)
        found = level(action, row["consensus"])
        agreed.append(found in SAME)
        acts.append(_act(row, text, found))
        if found is not None:
            levels[found] += 1
        if row["consensus"].get("tool_calls"):
            valid_at.append(bool(action.get("tool_calls")))
    return {
        **{name: count / max(len(rows), 1) for name, count in sorted(levels.items())},
        "same": sum(agreed) / max(len(agreed), 1),
        "n": len(rows),
        "valid": sum(valid_at) / max(len(valid_at), 1),
        "n_calls": len(valid_at),
        "agreed": agreed,
        "valid_at": valid_at,
        "acts": acts,
    }


@torch.no_grad()
def greedy_ids(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    on_acted: Callable[[int], object] = lambda _n: None,
) -> list[list[int]]:
    """Continue prompts greedily, those of like length in one batch.

    Returns:
        The ids of each continuation, up to the token that ends its turn.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    written: dict[int, list[int]] = {}
    ends = end_tokens(model, tokenizer)
    for places in _batches([len(ids) for ids in prompts], is_padded=_takes_positions(model)):
        asked = {"input_ids": [list(prompts[i]) for i in places]}
        batch = tokenizer.pad(asked, padding_side="left", return_tensors="pt").to(device)
        generated_BT = model.generate(
            **batch,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=ends,
        )
        new_BT = generated_BT[:, batch["input_ids"].size(1) :]
        for place, ids in zip(places, new_BT.tolist(), strict=True):
            end = next((n for n, one in enumerate(ids) if one in ends), len(ids))
            written[place] = ids[: end + 1]
        on_acted(len(places))
    model.train(was_training)
    return [written[i] for i in range(len(prompts))]


def _action(tokenizer: Any, prompt: Sequence[int], ids: Sequence[int], text: str) -> Message:
    """Read what was written: a call in one of the usual forms, or in the one of the tokenizer's own template."""
    action = as_message(text)
    if action.get("tool_calls") or getattr(tokenizer, "response_template", None) is None:
        return action
    try:
        read = tokenizer.parse_response(list(ids), prefix=list(prompt))
        calls = [
            {"function": {**call["function"], "arguments": dict(call["function"]["arguments"])}}
            for call in read.get("tool_calls") or ()
        ]
    except (ValueError, TypeError, KeyError):
        return action
    return (
        {**action, "content": read.get("content") or "", "tool_calls": calls} if calls else action
    )


def _takes_positions(model: Any) -> bool:
    """Check whether padding on the left leaves a model's tokens where they are; a recurrent one reads it."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "position_ids" in inspect.signature(base.forward).parameters


def _batches(lengths: Sequence[int], *, is_padded: bool) -> Iterator[list[int]]:
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        n_rows = len(batch) + 1
        fits = n_rows <= BATCH_ROWS and n_rows * lengths[place] <= BATCH_TOKENS
        if batch and not (fits and (is_padded or lengths[batch[0]] == lengths[place])):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _act(row: PromptRow, text: str, level: str | None) -> dict[str, Any]:
    """Return what a person reads of an action: what was asked last, what is agreed on, what was done, how alike."""
    said = [m.get("content") for m in row["prompt"] if m.get("role") == "user"]
    asked = next((each for each in reversed(said) if isinstance(each, str) and each), "")
    return {
        "state_id": row.get("state_id"),
        "asked": asked[:_ACT_CHARS],
        "consensus": row["consensus"],
        "text": text[:_ACT_CHARS],
        "level": level,
    }


_ACT_CHARS = 2_000


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """List the ids that end a generation: the model's own, and the template's end of a turn."""
    own = model.generation_config.eos_token_id
    ids = set(own if isinstance(own, list) else [own]) | {tokenizer.eos_token_id}
    ids |= {tokenizer.convert_tokens_to_ids(end) for end in getattr(tokenizer, "turn_ends", ())}
    return sorted(i for i in ids if i is not None)


def general_texts(tokenizer: Any) -> list[list[int]]:
    """Return token ids of plain English. The loss is measured on every second text.

    The texts are from Python's manual, which comes with every Python and is unrelated to anybody's
    sessions.
    """
    names = sorted(topics)
    chosen = names[:: max(len(names) // (2 * _N_TEXTS), 1)][: 2 * _N_TEXTS]
    texts = [topics[name][: 8 * _TEXT_TOKENS] for name in chosen]
    return [tokenizer(t, add_special_tokens=False)["input_ids"][:_TEXT_TOKENS] for t in texts]


def held_texts(tokenizer: Any, max_tokens: int) -> list[list[int]]:
    """Return token ids of whole texts that a model is held to. The general loss isn't measured on them.

    They are the descriptions of the libraries that the trainer stands on, each from a heading or a
    paragraph to the end of one, at most `max_tokens` long.
    """
    found = []
    for name in _DESCRIBED:
        with suppress(PackageNotFoundError):
            paragraphs = re.split(r"\n\s*\n", str(metadata(name).json.get("description") or ""))
            ids: list[int] = []
            for paragraph in paragraphs:
                text = paragraph.strip() + "\n\n"
                if not re.match(r"[A-Z#]", text):  # a picture, a list of marks, or code
                    continue
                more = tokenizer(text, add_special_tokens=False)["input_ids"]
                if len(ids) + len(more) > max_tokens:
                    found.append(ids)
                    ids = []
                ids = [*ids, *more] if len(ids) + len(more) <= max_tokens else []
            found.append(ids)
    return [ids for ids in found if len(ids) > 8]


@torch.no_grad()
def general_loss(model: Any, tokenizer: Any) -> float:
    """Return the mean negative log-likelihood per token, in nats, on plain English.

    Figures are comparable only for the same version of Python and the same tokenizer.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    total, n = 0.0, 0
    for ids in general_texts(tokenizer)[::2]:
        batch = torch.tensor([ids], device=device)
        total += float(model(input_ids=batch, labels=batch).loss) * (len(ids) - 1)
        n += len(ids) - 1
    model.train(was_training)
    return total / n if n else math.nan


def compared(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report's figures: before, after, their 95 % intervals, and the verdict.

    What was scored at no pair or state has no figure.
    """
    pairs, acted = after["preference"], after["consensus"]
    n_scored = {
        "preference_accuracy": pairs["n_pairs"],
        "blank_prompt_accuracy": pairs["n_pairs"],
        "prompt_gain": pairs["n_pairs"],
        "consensus_rate": acted["n"],
        "valid_calls": acted["n_calls"],
    }
    figures: dict[str, Any] = {}
    for when, scores in (("before", before), ("after", after)):
        found = {
            f"{name}_accuracy": scores[name]["accuracy"] for name in ("preference", "blank_prompt")
        }
        found["prompt_gain"] = scores["prompt_gain"]
        found["consensus_rate"] = scores["consensus"]["same"]
        found["valid_calls"] = scores["consensus"]["valid"]
        figures |= {f"{name}_{when}": each for name, each in found.items() if n_scored[name]}
        figures[f"general_loss_{when}"] = scores["general_loss"]
    return {
        **figures,
        "held_out_pairs": pairs["n_pairs"],
        "held_out_states": acted["n"],
        "intervals_after": {
            name: wilson_interval(figures[f"{name}_after"], n_scored[name])
            for name in ("preference_accuracy", "consensus_rate", "valid_calls")
            if n_scored[name]
        },
        **verdict(before, after),
    }


def verdict(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Compare a model's actions before and after training, state by state.

    A model acts worse if it lost more states than it gained, in agreement with the consensus or in
    well-formed calls, by a one-sided exact sign test (McNemar 1947) at 5 %. It has learned
    something if the margin of the chosen side rose for more held-out pairs than it fell for, by the
    same test at 1 %. The rate of consensus actions tells less, because a model that only learned to
    write calls hits some of them.

    Returns:
        `acts_worse`, `learned` (None if there are too few pairs to tell), and `findings` in
        sentences.
    """
    findings = []
    acts_worse = False
    for name, what in (
        ("agreed", "takes the consensus action"),
        ("valid_at", "writes a well-formed call"),
    ):
        were, are = before["consensus"][name], after["consensus"][name]
        lost = sum(was and not now for was, now in zip(were, are, strict=True))
        gained = sum(now and not was for was, now in zip(were, are, strict=True))
        if lost > gained and sign_test(lost, gained) < SURE:
            acts_worse = True
            findings.append(
                f"the model {what} at {sum(are)} of {len(are)} held-out states, before training at "
                f"{sum(were)}: it acts worse"
            )
    rise = after["general_loss"] / before["general_loss"] - 1
    if rise > MAX_GENERAL_RISE:
        findings.append(f"its loss on general text rose by {rise:.0%}")
    learned, nothing = _learned(before["preference"]["margins"], after["preference"]["margins"])
    if learned is False:
        findings.append(nothing)
    return {"acts_worse": acts_worse, "learned": learned, "findings": findings}


def _learned(before: Sequence[float], after: Sequence[float]) -> tuple[bool | None, str]:
    """Return whether the margins rose by more than chance, and the finding if they did not."""
    if before and before == after:
        return False, (
            "nothing was learned: the model ranks every held-out pair as it did before training"
        )
    if sign_test(len(before), 0) >= SURE_LEARNED:
        return None, ""
    risen = sum(now > was for was, now in zip(before, after, strict=True))
    fallen = sum(now < was for was, now in zip(before, after, strict=True))
    return sign_test(risen, fallen) < SURE_LEARNED, (
        f"nothing was learned that chance does not explain: the chosen side gained on the other in "
        f"{risen} of {len(after)} held-out pairs"
    )


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of `n` (Wilson 1927), or [0, 1] if `n` is 0."""
    if n == 0 or math.isnan(share):
        return 0.0, 1.0
    z2 = 1.96**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = 1.96 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def sign_test(more: int, fewer: int) -> float:
    """Return the probability of at least `more` changes of one kind, if both kinds are equally likely."""
    n = more + fewer
    return sum(math.comb(n, k) for k in range(more, n + 1)) / 2**n
