"""Judge one state: count who stands where, decide by the rule, and hear what speaks against a pair.

Agreement alone also makes pairs that teach nothing or the wrong thing, such as a refusal that two
teachers share. So every pair is proposed to a list of objections, and the first that speaks wins.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from replay_pipeline.actions import (
    LEVELS,
    Action,
    agreement_level,
    agrees_at,
    differ_in_calls_alone,
)
from replay_pipeline.actions.keys import purpose_of
from replay_pipeline.actions.votes import Consensus, Panel, Vote, has_one_effect
from replay_pipeline.judge.answers import Case, ExtractOptions, level_of
from replay_pipeline.judge.belief import evidence_of, right_if_unconfirmed
from replay_pipeline.judge.feasibility import PromptState
from replay_pipeline.judge.known_files import replacements
from replay_pipeline.judge.rule import Standing, nearest_level, rule, standing_of_votes
from replay_pipeline.types import AgreementLevel, Look, TraceState


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgment:
    """What the answers at a state make."""

    case: Case
    outcome: str
    why: str | None
    consensus: Consensus | None
    standing: Standing
    is_tie: bool
    student_level: AgreementLevel | None
    """How close the agent comes to the consensus."""
    near_level: AgreementLevel | None
    """The next looser level with a consensus, where there is none."""
    with_agent: list[Vote]
    """Valid answers that take the agent's action."""
    levels: list[tuple[Vote, Vote, int]]
    """The strictness of the agreement between each two valid answers."""
    evidence: float
    """How much likelier what the session tells is if the agent's action is wrong."""
    looks: tuple[Look, ...] = ()
    """What a teacher looked at first, where the consensus needs it and the agent's prompt lacks it."""
    unconfirmed: "Unconfirmed | str | None" = None
    """What to imitate where too few agree, or why there is nothing. None where enough do."""


@dataclass(frozen=True, slots=True)
class Unconfirmed:
    """An action that too few families stand for, to be imitated at its probability."""

    by: Consensus
    """The one vote for it."""
    action: Action
    p_right: float
    looks: tuple[Look, ...] = ()
    """What the teacher looked at first, if its action needs that."""


class Arbiter:
    """The arbiter between the agent and its teachers.

    Args:
        threshold: how many families make a consensus.
        options: how actions are compared.
    """

    def __init__(self, threshold: int, options: ExtractOptions) -> None:
        self.threshold = threshold
        self.level: AgreementLevel = level_of(options)
        self.same_text = options.get("same_text")

    def is_same(self, one: Action, other: Action) -> bool:
        """Return whether two actions agree at the level of this arbiter."""
        return agrees_at(self.level, agreement_level(one, other, same_text=self.same_text))

    def judge(self, case: Case) -> Judgment:
        """Judge the answers at a state."""
        effects = case.effects()
        everyone = Panel(case.valid, self.same_text, effects=effects)
        panel = everyone
        if len(case.voting) < len(case.valid):
            panel = Panel(case.voting, self.same_text, effects=effects)
        levels: dict[Action, AgreementLevel | None] = {}
        for action in everyone.distinct:
            found = agreement_level(case.agent, action, same_text=self.same_text)
            is_one = has_one_effect(case.agent, action, effects)
            levels[action] = "effect" if is_one and not agrees_at("effect", found) else found

        def is_agents(action: Action) -> bool:
            return agrees_at(self.level, levels[action])

        lead = panel.lead(self.level)
        standing = standing_of_votes(
            lead, case.voting, case.own, is_agents=is_agents, is_same=self.is_same
        )
        with_agent = [vote for vote in case.valid if is_agents(vote.action)]
        n_needed = self.threshold - self._is_confirmed(case, standing, with_agent)
        is_tie = standing.is_tie(n_needed)
        decision = rule(standing, n_needed)
        has_consensus = lead is not None and decision in ("agreement", "contested", "pair")
        consensus = lead.consensus if has_consensus else None
        outcome: str = decision if case.agent.is_valid else "invalid_action"
        why: str | None = None
        if not case.asked and (why := purpose_of(case.agent)):
            outcome = "not_asked"
        looks: tuple[Look, ...] = ()
        if consensus is not None and outcome in ("pair", "contested"):
            disputing = standing.n_against if outcome == "contested" else 0
            found, needed = self._objection(case, consensus, disputing)
            outcome, why = found or ("pair", None)
            if outcome == "infeasible" and decision == "pair" and needed:
                outcome, why, looks = "after_looks", None, needed
        ended = case.state.get("outcome")
        evidence = evidence_of(ended, case.agent.tools, case.state.get("hint"))
        if outcome == "agreement" and evidence > 1:
            # What failed or was refused when the agent did it is no lesson, whoever would do it too.
            outcome, why = "would_fail", f"in the log: {case.state.get('error_kind') or ended}"
        unconfirmed: Unconfirmed | str | None = None
        if outcome in ("no_consensus", "too_few_answers") and case.voting:
            unconfirmed = self._unconfirmed(case, with_agent, evidence)
        found_levels = {levels[vote.action] for vote in consensus.votes} if consensus else set()
        return Judgment(
            case=case,
            outcome=outcome,
            why=why,
            consensus=consensus,
            standing=standing,
            is_tie=is_tie,
            student_level=next((at for at in LEVELS if at in found_levels), None)
            if case.agent.is_valid
            else None,
            near_level=nearest_level(panel, self.level, self.threshold)
            if outcome == "no_consensus" and not is_tie
            else None,
            with_agent=with_agent,
            levels=list(everyone.levels()),
            evidence=evidence,
            looks=looks,
            unconfirmed=unconfirmed,
        )

    def _objection(
        self, case: Case, chosen: Consensus, n_disputing: int = 0
    ) -> tuple[tuple[str, str | None] | None, tuple[Look, ...]]:
        """Return what speaks against what teachers would do, and the looks after which it can be done."""
        proposal = Proposal(
            state=case.state,
            chosen=chosen.action,
            rejected=case.agent,
            level=self.level,
            spellings=[vote.action for vote in chosen.votes],
            case=case,
            n_disputing=n_disputing,
        )
        found = first_objection(proposal, OBJECTIONS["recorded"])
        if found is None or found[0] != "infeasible":
            return found, ()
        return found, _looks_needed(proposal, [vote.row.looks for vote in chosen.votes])

    def _unconfirmed(
        self, case: Case, with_agent: Sequence[Vote], evidence: float
    ) -> Unconfirmed | str:
        """Return what is likely right where too few agree, or what speaks against it.

        That is the agent's action if somebody took it and at most one did not, or else the only answer.
        Of several that all differ, each is right in little more than half of the states
        (`benchmarks/real_models.py`).
        """
        # Where agent and teacher end the turn, they agree in that, in whatever words. Without such rows
        # a model unlearns to stop.
        mine = [
            vote
            for vote in case.voting
            if vote in with_agent or not (vote.action.calls or case.agent.calls)
        ]
        n_differing = len(case.voting) - len(mine)
        if n_differing > 1:
            return "all_differ"
        lead = Panel((mine or case.voting)[:1], self.same_text).lead(self.level)
        assert lead is not None, "a vote leads where it is the only one"
        by = lead.consensus
        if mine:
            p = right_if_unconfirmed(n_differing, is_agents=True)
            return "would_fail" if evidence > 1 else Unconfirmed(by, case.agent, p)
        found, looks = self._objection(case, by)
        if found is not None and found[0] not in LESSONS_ALONE and not looks:
            return found[0]
        return Unconfirmed(by, by.action, right_if_unconfirmed(0, is_agents=False), looks)

    def _is_confirmed(self, case: Case, standing: Standing, with_agent: Sequence[Vote]) -> bool:
        """Return whether all who were asked took the recorded action, and only with its vote are enough.

        Gates stop there, because no pair is possible any more. What was paid for still says that the
        action is right.
        """
        return 0 < standing.n_voting == self.threshold - 1 and len(case.asked) == len(
            case.valid
        ) == len(with_agent)


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """Two actions at a state, of which one is proposed as the better one."""

    state: TraceState
    chosen: Action
    rejected: Action
    level: AgreementLevel
    spellings: Sequence[Action] = ()
    """What those who are for the chosen side wrote."""
    case: Case | None = None
    """The answers, if teachers propose it."""
    n_disputing: int = 0
    """Votes for the agent's action, if they are too many."""


Objection = Callable[[Proposal], tuple[str, str | None] | None]
"""Returns an outcome and its details if something speaks against a pair."""


def first_objection(it: Proposal, objections: Sequence[Objection]) -> tuple[str, str | None] | None:
    """Return what the first of these objections says that speaks, or None."""
    return next((found for each in objections if (found := each(it)) is not None), None)


_REFUSAL = re.compile(
    r"(?:i[’']?m |i am )?(?:very |so |deeply )?(?:sorry|afraid)\b"
    r"|(?:but |unfortunately,? )?i (?:can[’']?t|cannot|can not|won[’']?t|will not"
    r"|am (?:not able|unable|not permitted) to|[’']?m (?:not able|unable) to|must decline)\b"
    r"|as an ai\b|unable to (?:help|assist|comply)"
    # In the other languages of the models' vendors and their users.
    r"|(?:es )?tut mir leid\b|leider\b|(?:ich bitte um )?entschuldigung\b|ich (?:kann|darf|werde) .{0,60}?\bnicht\b"
    r"|lo siento\b|lamento\b|lamentablemente\b|(?:yo )?no (?:puedo|debo)\b"
    r"|(?:je suis )?(?:vraiment )?désolée?\b|malheureusement\b|je (?:ne peux|ne suis pas en mesure|regrette)"
    r"|mi dispiace\b|purtroppo\b|non posso\b|(?:sinto muito|desculpe|infelizmente|(?:eu )?não posso)\b"
    r"|извините|простите|к сожалению|(?:я )?не могу\b"
    r"|(?:大変)?申し訳|すみません|残念ながら|お手伝いできません|(?:非常|很)?抱歉|对不起|對不起|很遗憾|我(?:无法|無法|不能)"
    r"|죄송|유감|도와드릴 수 없|(?:أنا )?آسف|عذر|للأسف|لا (?:أستطيع|يمكنني)|क्षमा|माफ़",
    re.IGNORECASE,
)


def _refuses(it: Proposal) -> tuple[str, None] | None:
    """A text that refuses is no better side."""
    refuses = not it.chosen.calls and _REFUSAL.match(it.chosen.text.strip())
    return ("refusal", None) if refuses else None


def _would_fail(it: Proposal) -> tuple[str, str | None] | None:
    """Nor is an action that was tried, and that its tool refuses or that breaks the project.

    Work is often broken half-way, so a broken check counts only where the other side breaks it not.
    """
    if it.case is None or (trial := it.case.trial(it.chosen)) is None:
        return None
    if not trial.works:
        return "would_fail", trial.error_kind
    other = it.case.trial(it.rejected)
    if trial.check == "broken" and other is not None and other.check != "broken":
        return "would_fail", "the project's check fails after it"
    return None


def _stops(it: Proposal) -> tuple[str, None] | None:
    """One side ends the turn with a text where the other calls a tool.

    Both directions count. The prompt doesn't show whether the work is done, and pairs in only one
    direction would teach the model to stop always or never. What teachers agree on is a lesson all
    the same: without those that stop, a model unlearns to stop.
    """
    if bool(it.chosen.calls) == bool(it.rejected.calls):
        return None
    return ("late_stop" if it.chosen.calls else "early_stop"), None


def _counts_calls(it: Proposal) -> tuple[str, None] | None:
    """One side only has more calls than the other, or the same in another order."""
    is_so = any(differ_in_calls_alone(each, it.rejected, level=it.level) for each in it.spellings)
    return ("call_count", None) if is_so else None


def _leaves_calls_out(it: Proposal) -> tuple[str, None] | None:
    """The chosen side only has fewer calls than the agent's, or the same in another order.

    Calls that the teachers alone make are missing in the agent's action, unless it makes them later on (`deferred`).
    """
    return _counts_calls(it) if len(it.chosen.calls) <= len(it.rejected.calls) else None


def _is_hindered(it: Proposal) -> tuple[str, str] | None:
    """The prompt speaks against the chosen side, or it teaches nothing there."""
    prompt = _prompt(it, ())
    if (found := prompt.obstacle(it.chosen)) is not None:
        return found
    return ("needless", why) if (why := prompt.needless(it.chosen)) else None


def _prompt(it: Proposal, looks: Iterable[Look]) -> PromptState:
    """Return the prompt after looks."""
    added = [message for look in looks for message in look.messages()]
    return PromptState(
        [*it.state["messages"], *added],
        it.rejected,
        cwd=it.state.get("cwd"),
        typed=it.state.get("typed"),
        tools=it.state.get("tools"),
    )


def _looks_needed(it: Proposal, seen: Iterable[tuple[Look, ...]]) -> tuple[Look, ...]:
    """Return the fewest looks of a teacher, all answered, after which nothing speaks against the chosen side any more."""
    known = (looks for looks in seen if looks and all(look.is_known for look in looks))
    longer = sorted(known, key=len)
    clear = (looks for looks in longer if _prompt(it, looks).obstacle(it.chosen) is None)
    return next(clear, ())


def _is_disputed(it: Proposal) -> tuple[str, str] | None:
    return ("contested", f"{it.n_disputing} for the student's action") if it.n_disputing else None


def _is_invalid(it: Proposal) -> tuple[str, None] | None:
    return None if it.chosen.is_valid and it.rejected.is_valid else ("invalid", None)


def _is_one_action(it: Proposal) -> tuple[str, None] | None:
    is_so = agrees_at(it.level, agreement_level(it.chosen, it.rejected))
    return ("same_action", None) if is_so else None


def _has_other_object(it: Proposal) -> tuple[str, None] | None:
    """What follows a rejected action is no second try of it, as an edit of other lines is none."""
    is_so = not agrees_at("target", agreement_level(it.chosen, it.rejected))
    ours, theirs = map(_replaced_lines, (it.chosen, it.rejected))
    shares_words = any(map(_WORD.search, ours & theirs))
    is_elsewhere = ours and theirs and ours != theirs and not shares_words
    return ("other_object", None) if is_so or is_elsewhere else None


_WORD = re.compile(r"\w")


def _replaced_lines(action: Action) -> set[str]:
    return {
        line.strip()
        for _, edits in replacements(action.calls)
        for edit in edits
        for line in edit.old.splitlines()
    }


_OF_RECORD = (_is_invalid, _is_one_action, _counts_calls, _refuses, _stops)
OBJECTIONS: dict[Literal["recorded", "rewind", "rejection"], tuple[Objection, ...]] = {
    "recorded": (_refuses, _would_fail, _leaves_calls_out, _is_hindered, _is_disputed, _stops),
    "rewind": (*_OF_RECORD, _is_hindered),
    "rejection": (*_OF_RECORD, _has_other_object, _is_hindered),
}
"""What is heard against a pair, by where its rejected side comes from."""
LESSONS_ALONE = ("after_looks", "early_stop", "late_stop")
"""What makes no pair, but a lesson: nothing else speaks against what the teachers agree on."""
