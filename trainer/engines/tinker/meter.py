"""Keep a run on Tinker below a cost ceiling, and log how long it waits for answers."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from trainer.errors import EnvironmentFailedError, TrainingStoppedError
from trainer.settings import SharedSettings

logger = logging.getLogger(__name__)

LOOK_S, SAY_S = 0.5, 15.0
SETTLE_S = 10.0
"""Seconds to wait for an answer after a request to stop."""


def wait(future: Any, should_stop: Callable[[], bool], *, patience_s: float | None = None) -> Any:
    """Return a future's result, and log how long it takes.

    Args:
        future: a future of the client, or of Python.
        should_stop: returns whether the run was asked to stop.
        patience_s: seconds after which an error is raised. By default, the client's own limit of
            some minutes.

    Raises:
        TrainingStoppedError: the run was asked to stop, and no answer came.
        EnvironmentFailedError: no answer came in `patience_s`.
    """
    began = said = time.monotonic()
    while True:
        try:
            return future.result(timeout=LOOK_S)
        except TimeoutError:
            now = time.monotonic()
            if should_stop() and now - began > SETTLE_S:
                raise TrainingStoppedError(
                    "stopped while Tinker did not answer: continue from the last saved state"
                ) from None
            if patience_s is not None and now - began > patience_s:
                raise EnvironmentFailedError(f"Tinker: no answer in {patience_s:g} s") from None
            if now - said > SAY_S:
                said = now
                logger.warning("Tinker has not answered for %.0f s", now - began)


def cost_usd(counts: Counter[str], usd_per_million: dict[str, float]) -> float:
    """Return the cost of sampled, prefilled, and trained tokens, in dollars."""
    return sum(
        counts[f"{kind}_tokens"] * usd_per_million.get(kind, 0.0) / 1e6
        for kind in ("sampled", "prefilled", "trained")
    )


def bound_of_step(shared: SharedSettings) -> Counter[str]:
    """Return the most tokens that one step can take, of each kind."""
    n_rollouts = shared.per_device_train_batch_size * shared.gradient_accumulation_steps
    prompt, completion = shared.max_prompt_tokens, shared.max_completion_length
    n_pairs = shared.pairs_per_step if shared.beta_replay > 0 else 0
    side = prompt + shared.max_response_tokens
    is_hinted = shared.alpha_sdpo > 0
    # A loss of our own is one pass forward, and one forward and back.
    return Counter(
        sampled_tokens=n_rollouts * completion,
        prefilled_tokens=n_rollouts * prompt
        + is_hinted * n_rollouts * (prompt + completion)
        + shared.preference.needs_reference * n_pairs * 2 * side,
        trained_tokens=n_rollouts * (prompt + completion) * (1 + 2 * is_hinted)
        + n_pairs * 2 * side * 2,
    )
