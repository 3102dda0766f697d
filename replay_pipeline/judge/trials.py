"""What became of actions that were tried, as far as votes and pairs are concerned."""

from collections.abc import Mapping
from typing import Any

from replay_pipeline.actions import Action
from replay_pipeline.judge.answers import Answers, Side
from replay_pipeline.types import TraceState, Trial


class TrialBook:
    """Trials of actions, by state and rendered action."""

    def __init__(
        self,
        trials: Mapping[str, Mapping[str, Trial]] | None,
        became: Mapping[str, str] | None = None,
    ) -> None:
        """Take what was tried, and what became of the agent's edits; None where nothing is known."""
        self._trials = trials or {}
        self._became = became or {}

    def of(self, state: TraceState, action: Action) -> Trial | None:
        """Return what became of an action where it was tried."""
        return self._trials.get(state["state_id"], {}).get(action.render())

    def effects(self, state: TraceState, side: Side, answers: Answers) -> dict[Action, str]:
        """Return the effect of each tried action at a state, if it had an effect."""
        if state["state_id"] not in self._trials:
            return {}
        actions = {side.action, *(vote.action for vote in answers.valid)}
        tried = {action: self.of(state, action) for action in actions}
        return {a: t.effect for a, t in tried.items() if t is not None and t.effect is not None}

    def objection(
        self, state: TraceState, chosen: Action, rejected: Action
    ) -> tuple[str, str | None] | None:
        """Return why a tried action is no better side: its tool refuses it, or it breaks the project.

        Work is often broken half-way, so a broken check counts only where the other side breaks it not.
        """
        trial, other = self.of(state, chosen), self.of(state, rejected)
        if trial is None:
            return None
        if not trial.works:
            return "would_fail", trial.error_kind
        if trial.check == "broken" and other is not None and other.check != "broken":
            return "would_fail", "the project's check fails after it"
        return None

    def told(self, state: TraceState, chosen: Action, side: Side) -> dict[str, Any]:
        """Return what a pair says of its sides where they were tried, or were taken back since."""
        tried = {
            "chosen_trial": self.of(state, chosen),
            "rejected_trial": self.of(state, side.action),
        }
        found: dict[str, Any] = {
            name: trial.in_words() for name, trial in tried.items() if trial is not None
        }
        better, worse = (trial.check if trial is not None else "" for trial in tried.values())
        is_undone = self._became.get(state["state_id"]) == "undone"
        evidence = {
            "check": better == "fixed" and worse not in ("", "fixed"),
            "undone": is_undone and side.source == "recorded",
        }
        if any(evidence.values()):
            found["evidence"] = [name for name, is_so in evidence.items() if is_so]
        return found

    def row(self, state: TraceState) -> dict[str, Any]:
        """Return what the row of a state says of everything that was tried at it."""
        tried = self._trials.get(state["state_id"], {})
        became = self._became.get(state["state_id"])
        told = {action: _told(trial) for action, trial in tried.items()}
        return {"trials": told or None, "became": became} if told or became else {}


def _told(trial: Trial) -> dict[str, str]:
    told = {"result": trial.in_words(), "answer": trial.answer, "diff": trial.diff}
    return {name: text for name, text in told.items() if text}
