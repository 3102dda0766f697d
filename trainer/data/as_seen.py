"""Show one pair as the model sees it."""

from collections.abc import Mapping
from typing import Any

from trainer.data.budget import sides_of
from trainer.data.rendering import Renderer

SIDES = ("chosen", "rejected")


def as_seen(row: Mapping[str, Any], renderer: Renderer, tokenizer: Any) -> dict[str, Any]:
    """Return a pair as training sees it: texts and ids of the prompt and both sides, and the cuts.

    A row that is only imitated has the same action on both sides, and shows it once.
    """
    prompt, cut = renderer.prompt(row["prompt"], row.get("tools"), sides=sides_of(row))
    found: dict[str, Any] = {
        "state_id": row.get("state_id"),
        "weight": 1.0 if row.get("weight") is None else row["weight"],
        # The balance is known only within a run, which scores the pairs before it starts.
        **({"balance": row["balance"]} if "balance" in row else {}),
        "prompt (read, not scored)": _shown(tokenizer, prompt),
    }
    cuts = {"prompt": str(cut)}
    sides = SIDES if row["chosen"] != row["rejected"] else SIDES[:1]
    for side in sides:
        ids, response_cut = renderer.response(row[side], after=row["prompt"])
        found[f"{side} (scored)"] = _shown(tokenizer, ids)
        cuts[side] = str(response_cut)
    return found | {
        "is_prompt_cut": bool(cut),
        "cut by max_prompt_tokens": cuts["prompt"],
        "cut by max_response_tokens": {side: cuts[side] for side in sides},
        "budget": {
            "max_prompt_tokens": renderer.max_prompt_tokens,
            "max_response_tokens": renderer.max_response_tokens,
        },
    }


def parts_of(seen: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the texts of a pair from `as_seen`, each below a heading line."""
    budget, cut = seen["budget"], seen["cut by max_response_tokens"]
    prompt = seen["prompt (read, not scored)"]
    parts = [
        (
            f"prompt: {prompt['n_tokens']} of {budget['max_prompt_tokens']} tokens, read and not "
            f"scored; cut: {seen['cut by max_prompt_tokens']}",
            prompt["text"],
        )
    ]
    for side in cut:
        shown = seen[f"{side} (scored)"]
        line = (
            f"{side}: {shown['n_tokens']} of {budget['max_response_tokens']} tokens, every one of "
            f"them scored; cut: {cut[side]}"
        )
        parts.append((line, shown["text"]))
    return parts


def _shown(tokenizer: Any, ids: list[int]) -> dict[str, Any]:
    return {"n_tokens": len(ids), "text": tokenizer.decode(ids), "token_ids": ids}
