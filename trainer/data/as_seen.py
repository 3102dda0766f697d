"""Show one pair as the model sees it."""

from collections.abc import Mapping
from typing import Any

from trainer.data.rendering import Renderer

SIDES = ("chosen", "rejected")


def as_seen(row: Mapping[str, Any], renderer: Renderer) -> dict[str, Any]:
    """Return a pair as training sees it: texts and ids of the prompt and both sides, and the cuts.

    A row that is only imitated has the same action on both sides, and shows it once.
    """

    def shown(ids: list[int]) -> dict[str, Any]:
        text = renderer.tokenizer.decode(ids)
        return {"n_tokens": len(ids), "text": text, "token_ids": ids}

    prompt, cut = renderer.row_prompt(row)
    found: dict[str, Any] = {
        "state_id": row.get("state_id"),
        "weight": 1.0 if row.get("weight") is None else row["weight"],
        # The balance is known only within a run, which scores the pairs before it starts.
        **({"balance": row["balance"]} if "balance" in row else {}),
        "prompt (read, not scored)": shown(prompt),
    }
    cuts = {}
    for side in SIDES if row["chosen"] != row["rejected"] else SIDES[:1]:
        ids, response_cut = renderer.response(row[side], after=row["prompt"])
        found[f"{side} (scored)"] = shown(ids)
        cuts[side] = str(response_cut)
    return found | {
        "cut by max_prompt_tokens": str(cut),
        "cut by max_response_tokens": cuts,
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
