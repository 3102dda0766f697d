"""Ask a model at fixed decisions of one's own sessions, and say whether it could have done the work.

The decisions are drawn once, evenly over all conversations, and kept under a name: the next model meets the same ones.
They are drawn in runs of consecutive ones, since a long prompt costs a tenth once the provider has the one before.
Where the model doesn't do what the agent did, a panel of teachers of other makers is asked, too. Asking ends when the
answer is known, or with the money: if the decisions don't tell, further ones join them. Some of what is left then asks the
model that wrote the sessions, whose difference from itself is the best that any model can reach.
"""

import contextlib
import hashlib
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter, itemgetter
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from replay_pipeline.actions import Action, canonical_action
from replay_pipeline.actions.votes import read_answer
from replay_pipeline.errors import ConfigError, PriceError
from replay_pipeline.judge.vain import IN_VAIN, looked_in_vain
from replay_pipeline.judge.verdict import (
    FEWEST,
    MARGIN,
    USUAL,
    Scored,
    Verdict,
    is_same,
    judged,
    verdict,
)
from replay_pipeline.replay import estimate, openrouter_name, replay_in_thread
from replay_pipeline.replay.ask.looks import ANY_SHARE
from replay_pipeline.replay.dialects.replies import MALFORMED
from replay_pipeline.stages.pages.costs import turn_usd
from replay_pipeline.stages.pages.public_scores import words_of_scores
from replay_pipeline.stages.project import Project
from replay_pipeline.stages.receipts import Receipt, grouped
from replay_pipeline.stages.replay import accounts, who_answers_looks
from replay_pipeline.stages.work.trials import Trials, try_batch
from replay_pipeline.types import TeacherAction, TeacherSpec, TraceState, Trial, family_of_model

_RUN = 16
"""Most consecutive decisions that are drawn together. On 89 conversations with prompts of 43,000 tokens, a decision costs
3.2 cents alone and 0.9 in such runs; where mistakes of one run are alike by .05, as there, none tell more for the money."""
_PORTION = 30
"""Decisions that are asked, in whole runs, before one looks whether the answer is known."""
_AGAIN = 5
"""One in so many decisions is put to the agent's own model again."""
_CEILING_SHARE = 0.25
"""The most that this may take of the money."""
_MOST_PANEL = 3
_FEWEST_OF_KIND = 10
_ASSUMED_APART = 20, 10
"""Decisions, and those at which models differ, before a verdict has told."""
_OTHER_KINDS = "other kinds"
"""What decisions are called of whose kind there are fewer."""
_WHO = {"could": "the model", "could not": "the agent", "can't tell": "not known yet"}
"""Who should do work of a kind that isn't known to differ from the whole."""
_INSTRUCTIONS = re.compile(
    r"(Contents of \S*CLAUDE\.md \(project instructions[^)]*\):\n\n).*?"
    r"(?=\n+(?:Contents of \S|# currentDate\b|\s*IMPORTANT: this context)|\Z)",
    re.DOTALL,
)
"""Where Claude Code shows a project's own instructions."""


class _Place(NamedTuple):
    """A decision of the sessions: its number among all states, what it belongs to, and its run."""

    number: int
    batch: str
    state_id: str
    session_id: str
    turn_idx: int
    model: str
    kind: str
    run: str


@dataclass(slots=True)
class _Asked:
    """What the answers of a model to the decisions of a cohort tell."""

    found: list[tuple[str, Scored]] = field(default_factory=list)
    """The kind of each judged decision, and what was judged."""
    counts: Counter[str] = field(default_factory=Counter)
    """Decisions that were not judged, by the reason."""
    usd: dict[str, float] = field(default_factory=dict)
    """What the model's answer to each judged decision cost."""
    spent_usd: float = 0.0


def verdict_run(
    project: Project,
    model: str,
    *,
    max_total_usd: float,
    than: str | None = None,
    cohort: str = "default",
    n_decisions: int = USUAL,
    instructions: str | None = None,
    tell: Callable[[str], object] = lambda _: None,
) -> Receipt:
    """Judge whether a model could have done the work of the one that wrote the sessions.

    Args:
        project: the data root, with its teachers.
        model: name of a teacher in the settings, or the endpoint's id of any other model.
        max_total_usd: hard ceiling in US dollars for new answers of all models together.
        than: the model that wrote the sessions; by default the one with the most decisions.
        cohort: name under which the decisions are kept.
        n_decisions: how many a new cohort has.
        instructions: text that the model gets in the place of the project's CLAUDE.md.
        tell: is given what is known for free, before anybody is asked.

    Returns:
        A receipt whose report has the sentence as `words`, the figures, and the verdict by kind of work.

    Raises:
        ConfigError: there are no decisions of `than`, or none whose prompt has a place for the instructions, or too few
            teachers of other makers.
        PriceError: a price is not known. Nothing was paid.
    """
    started = time.perf_counter()
    agent, drawn, rest = cohort_of(project, than=than, cohort=cohort, n_decisions=n_decisions)
    _tell_scores(project, model, agent, tell)
    tally, again, asked, portion = _Asked(), _Asked(), list[_Place](), list[_Place]()
    n_asked, ended = 0, "all decisions were asked"
    with project.teachers(project.root.batches("states")) as teachers:
        candidate, panel = models_of(project, teachers, model, agent)
        for n_asked, run in enumerate([*drawn, *rest], 1):
            portion += run if instructions is None else _with_place(project, run)
            if not portion or (len(portion) < _PORTION and n_asked < len(drawn) + len(rest)):
                continue
            left_usd = max_total_usd - tally.spent_usd
            is_over = _ask_and_judge(
                project, sorted(portion), candidate, panel, left_usd, tally, instructions
            )
            asked, portion = asked + portion, []
            if is_over:
                ended = "the money was spent"
                break
            found, _ = told_of(tally.found)
            if found.answer != "can't tell":
                ended = "the answer was known"
                break
        if not asked:
            raise ConfigError(
                "no prompt of these decisions shows a CLAUDE.md of the project, so other instructions have no place"
            )
        costs = _agent_costs(project, asked)
        if project.settings.played is None:
            model_again = openrouter_name(agent)
            itself = _asked_as(project, f"control:{model_again}", model_again)
            # Its prices may be many times the others', so it gets short prompts, as many as its share pays.
            worth_usd = min(max_total_usd - tally.spent_usd, _CEILING_SHARE * max_total_usd)
            n_again = max(_FEWEST_OF_KIND, len(asked) // _AGAIN)
            some, expected_usd = list[_Place](), 0.0
            for place in sorted(asked, key=lambda place: place.turn_idx):
                expected_usd += costs.get(place.state_id, 0.0)
                if expected_usd > worth_usd or len(some) == n_again:
                    break
                some.append(place)
            if len(some) >= _FEWEST_OF_KIND:
                with contextlib.suppress(ConfigError, PriceError):
                    _ask_and_judge(project, sorted(some), itself, panel, worth_usd, again)
    spent = tally.spent_usd + again.spent_usd
    if n_asked > len(drawn):
        _keep(project, cohort, agent, [*drawn, *rest][:n_asked])
    n_all = sum(map(len, drawn + rest))
    report = _report(candidate, tally, again, costs) | {
        "has_instructions": instructions is not None,
        "cohort": cohort,
        "panel": [teacher.name for teacher in panel],
        "spent_usd": round(spent, 6),
        "unspent_usd": round(max_total_usd - spent, 6),
        "usd_per_decision": tally.spent_usd / len(asked) if asked else None,
        "n_left": n_all - len(asked),
        "ended": f"{ended} ({len(asked)} of {max(sum(map(len, drawn)), len(asked))} decisions)",
        "is_play": project.settings.played is not None,
        "than": agent,
    }
    # A page shows the sentence alone.
    report["words"] = ("Made-up answers: " if report["is_play"] else "") + words_of(report)
    name = _name(cohort, candidate.model + (instructions or ""))
    return project.receipts.note("verdict", name, report, started=started)


def _name(cohort: str, model: str = "") -> str:
    """Return a name for a file of a cohort."""
    return f"{cohort}-{hashlib.sha256(model.encode()).hexdigest()[:8]}" if model else cohort


def cohort_of(
    project: Project, *, than: str | None, cohort: str, n_decisions: int
) -> tuple[str, list[list[_Place]], list[list[_Place]]]:
    """Return who made the decisions of a cohort, these by runs in the order of asking, and that model's other runs.

    A new cohort is drawn and kept. Decisions that are no longer there are left out.

    Raises:
        ConfigError: no decision is of `than`, or the cohort is of another model.
    """
    places = list(_places(project))
    if kept := project.receipts.read("verdict", _name(cohort)):
        agent, named = kept.report["than"], kept.report["states"]
        if than and than != agent:
            raise ConfigError(
                f"the cohort {cohort!r} has decisions of {agent}: name another one with --cohort"
            )
    else:
        by_model = Counter(place.model for place in places)
        agent = than or max(by_model, key=lambda name: (by_model[name], name), default=None)
        if agent is None or not by_model[agent]:
            wrote = ", ".join(name for name, _ in by_model.most_common(5)) or "nobody"
            raise ConfigError(
                f"no decision of {than or 'a model'} was found; these wrote some: {wrote}"
            )
        # Every so many of the runs: each project, time, and conversation gets its share.
        runs = _by_run(place for place in places if place.model == agent)
        n_runs = min(len(runs), math.ceil(n_decisions * len(runs) / by_model[agent]))
        some = _shuffled(runs[number * len(runs) // n_runs] for number in range(n_runs))
        named = _keep(project, cohort, agent, some)
    order = {state_id: number for number, state_id in enumerate(named)}
    own = [place for place in places if place.model == agent]
    drawn = [place for place in own if place.state_id in order]
    drawn.sort(key=lambda place: order[place.state_id])
    return (
        agent,
        _by_run(drawn),
        _shuffled(_by_run(place for place in own if place.state_id not in order)),
    )


def _keep(project: Project, cohort: str, agent: str, runs: Sequence[Sequence[_Place]]) -> list[str]:
    """Keep which decisions a cohort has, and return them."""
    states = [place.state_id for run in runs for place in run]
    project.receipts.note("verdict", _name(cohort), {"than": agent, "states": states})
    return states


def _by_run(places: Iterable[_Place]) -> list[list[_Place]]:
    """Return decisions by their runs, in the order of the first of each."""
    return list(grouped(places, attrgetter("run")).values())


def _shuffled(runs: Iterable[list[_Place]]) -> list[list[_Place]]:
    """Return runs in an order that has nothing to do with them, and is always the same."""
    return sorted(runs, key=lambda run: hashlib.sha256(run[0].run.encode()).digest())


def _places(project: Project) -> Iterator[_Place]:
    """Yield the decisions at which teachers are asked."""
    columns = ["state_id", "session_id", "turn_idx", "student_model", "action_tool_calls_json"]
    number, n_before = 0, Counter[tuple[str, str]]()
    for batch in project.root.batches("states"):
        rows = project.root.read("states", batch, columns=columns).to_pylist()
        for row, why in zip(rows, project.not_asked(batch), strict=True):
            if why is None and row["student_model"]:
                calls = msgspec.json.decode(row["action_tool_calls_json"] or "[]")
                kind = calls[0]["function"]["name"] if calls else "answers"
                state_id, session_id, turn_idx, model = (row[name] for name in columns[:4])
                run = f"{session_id} {n_before[session_id, model] // _RUN}"
                n_before[session_id, model] += 1
                yield _Place(number, batch, state_id, session_id, turn_idx, model, kind, run)
            number += 1


def models_of(
    project: Project, teachers: Sequence[TeacherSpec], model: str, agent: str
) -> tuple[TeacherSpec, list[TeacherSpec]]:
    """Return how to ask a model, and the panel: teachers of other makers than it and the agent.

    Raises:
        ConfigError: fewer than two such teachers are left, or a local server doesn't play the model.
    """
    candidate = next((each for each in teachers if model in (each.name, each.model)), None)
    if candidate is None:
        if project.settings.played:
            names = ", ".join(each.name for each in teachers)
            raise ConfigError(f"{model}: the {project.settings.played} only plays {names}")
        candidate = _asked_as(project, f"verdict:{model}", model)
    makers = {candidate.vendor, family_of_model(agent)}
    panel: dict[str, TeacherSpec] = {}
    for each in teachers:
        if each.vendor not in makers:
            panel.setdefault(each.vendor, each)
    if len(panel) < 2:
        raise ConfigError(
            f"a verdict on {model} needs two teachers of other makers than it and {agent}; these settings "
            f"have {', '.join(each.name for each in panel.values()) or 'none'}: add one to [[replay.teachers]]"
        )
    return candidate, list(panel.values())[:_MOST_PANEL]


def _asked_as(project: Project, name: str, model: str) -> TeacherSpec:
    """Return a model as a teacher, at the address of the settings for agents' models."""
    base = project.settings.replay.student or TeacherSpec(name=name, model=model)
    return base.model_copy(update={"name": name, "model": model, "is_distillable": False})


def _states(project: Project, places: Sequence[_Place]) -> Sequence[TraceState]:
    """Return the states of some decisions. Each is built on access."""
    return project.states(project.root.batches("states")).of([place.number for place in places])


def _terms(teachers: Sequence[TeacherSpec]) -> list[str]:
    """Accept all terms: the answers measure and are never trained on, so none on training apply."""
    return [each for teacher in teachers for each in (teacher.name, teacher.model)]


def _ask(
    project: Project,
    places: Sequence[_Place],
    teachers: Sequence[TeacherSpec],
    max_usd: float,
    instructions: str | None = None,
) -> tuple[dict[tuple[str, str], TeacherAction], float, bool]:
    """Ask at some decisions. Returns the answers by state and teacher, what was paid, and whether money ended."""
    states = _states(project, places)
    if instructions is not None:
        states = [instructed(state, instructions) for state in states]
    batches = {place.batch for place in places}
    with who_answers_looks(project, batches) as looks:
        report = replay_in_thread(
            states,
            teachers,
            max_total_usd=max(0.0, max_usd),
            counts_recorded=False,
            tick=project.on_progress,
            ledger=project.settings.ledger_url(),
            looks=looks,
            max_looks=project.settings.replay.max_looks,
            looks_share=ANY_SHARE,
            accepted_terms=_terms(teachers),
            max_concurrency=project.settings.replay.max_concurrency,
            retry=project.settings.replay.retry,
            **accounts(project),
        )
    answers = {(each.state_id, each.teacher): each for each in report.actions}
    paid = report.newly_spent_usd + report.unknown_usd
    return answers, paid, report.stop_reason == "budget"


def instructed(state: TraceState, instructions: str) -> TraceState:
    """Return a state whose prompt has other instructions in the place of the project's CLAUDE.md."""

    def replaced(value: Any) -> Any:
        if isinstance(value, str):
            return _INSTRUCTIONS.sub(lambda found: found[1] + instructions.strip(), value)
        if isinstance(value, list):
            return [replaced(each) for each in value]
        return {**value, "text": replaced(value["text"])} if "text" in value else value

    messages = [
        {**message, "content": replaced(message["content"])}
        if message["role"] in ("user", "system") and message.get("content")
        else message
        for message in state["messages"]
    ]
    return {**state, "messages": messages}


def _with_place(project: Project, places: Sequence[_Place]) -> list[_Place]:
    """Return the decisions whose prompts have a place for instructions."""
    shown = zip(places, _states(project, places), strict=True)
    return [place for place, state in shown if instructed(state, "") != state]


def _agent_costs(project: Project, places: Sequence[_Place]) -> Mapping[str, float]:
    """Return what the recorded decisions cost at list prices, by state, where that is known."""
    by_batch: dict[str, dict[tuple[str, int], str]] = defaultdict(dict)
    for place in places:
        by_batch[place.batch][place.session_id, place.turn_idx] = place.state_id
    found = {}
    for batch, wanted in by_batch.items():
        turns = project.root.read("turns", batch)
        keys = zip(turns["session_id"].to_pylist(), turns["turn_idx"].to_pylist(), strict=True)
        rows = [number for number, key in enumerate(keys) if key in wanted]
        for turn in turns.take(rows).to_pylist():
            state_id = wanted.get((turn["session_id"], turn["turn_idx"]))
            if state_id and (usd := turn_usd(turn)) is not None:
                found[state_id] = usd
    return found


def _ask_and_judge(
    project: Project,
    places: Sequence[_Place],
    model: TeacherSpec,
    panel: Sequence[TeacherSpec],
    max_usd: float,
    tally: _Asked,
    instructions: str | None = None,
) -> bool:
    """Ask a model at some decisions and the panel where it does something else, and judge. Returns whether money ended.

    Decisions are tried where the settings let actions be executed.
    """
    answers, paid, is_over = _ask(project, places, [model], max_usd, instructions)
    read: dict[str, tuple[_Place, TraceState, Action, Action]] = {}
    for place, state in zip(places, _states(project, places), strict=True):
        own = answers.get((place.state_id, model.name))
        action = _read(own, state) if own is not None else None
        if action is None:
            tally.counts["failed" if own is not None else "not asked"] += 1
            continue
        agent = canonical_action(state["student_action"], cwd=state.get("cwd"))
        read[place.state_id] = place, state, action, agent
    apart = [place for place, _, action, agent in read.values() if not is_same(action, agent)]
    if apart:
        others, paid_others, is_out = _ask(project, apart, panel, max_usd - paid)
        answers, paid, is_over = answers | others, paid + paid_others, is_over or is_out
    trials: Trials = {}
    for batch in {place.batch for place in apart}:
        named = {place.state_id for place in apart if place.batch == batch}
        theirs = [each for each in answers.values() if each.state_id in named]
        trials |= try_batch(project, batch, theirs)[0]
    for state_id, (place, state, action, agent) in read.items():
        rows = [answers.get((state_id, teacher.name)) for teacher in panel]
        voted = [_read(row, state) for row in rows if row is not None]
        told = [each for each in voted if each is not None]
        scored = judged(
            action,
            agent,
            [each for each in told if each.is_valid] if len(told) > 1 else None,
            state.get("tools") or (),
            state["messages"],
            tried=_credible(trials.get(state_id), agent, state),
            run=place.run,
        )
        tally.found.append((IN_VAIN if looked_in_vain(state) else place.kind, scored))
        tally.usd[state_id] = answers[state_id, model.name].cost_usd
        if scored.gain is None:
            tally.counts["where they differ, with too few answers of the panel"] += 1
    tally.spent_usd += paid
    return is_over


def _credible(
    tried: Mapping[str, Trial] | None, agent: Action, state: TraceState
) -> Mapping[str, Trial] | None:
    """Return results of trying actions, unless that of the agent's own contradicts the record: then the files differ."""
    own = tried.get(agent.render()) if tried else None
    outcome = state.get("outcome")
    is_command = any(call.name == "Bash" for call in agent.calls)
    if own is None or (own.works if outcome == "ok" else outcome != "tool_error" or is_command):
        return tried
    return tried if outcome == "tool_error" and not own.works else None


def _read(row: TeacherAction, state: TraceState) -> Action | None:
    """Return an answer's action, which may be invalid; None for a call that failed."""
    if row.error_code in MALFORMED:
        return Action(invalid_reason=row.error_code)
    return read_answer(row, cwd=state.get("cwd"), tools=state.get("tools"))


def _by_kind(found: Iterable[tuple[str, Scored]]) -> list[tuple[str, list[Scored]]]:
    """Return what was judged by the kind of work, the most frequent first, and rare kinds together at the end."""
    often: list[tuple[str, list[Scored]]] = []
    rare: list[Scored] = []
    for kind, pairs in grouped(found, itemgetter(0)).items():
        scored = [each for _, each in pairs]
        if len(scored) < _FEWEST_OF_KIND:
            rare += scored
        else:
            often.append((kind, scored))
    often.sort(key=lambda pair: (-len(pair[1]), pair[0]))
    return [*often, (_OTHER_KINDS, rare)] if rare else often


def told_of(found: Sequence[tuple[str, Scored]]) -> tuple[Verdict, list[str]]:
    """Return the verdict on some decisions, and the kinds of work to keep the agent for.

    Such a kind is one at which the model is surely worse than it may be. If it could do the rest, and that is half of
    the work or more, the verdict is on the rest.
    """
    kinds = dict(_by_kind(found))
    kept = [
        kind
        for kind, scored in kinds.items()
        if kind != _OTHER_KINDS and verdict(scored, usual=len(scored)).high < -MARGIN
    ]
    whole = verdict(each for _, each in found)
    rest = [each for kind, each in found if kind not in kept]
    if whole.answer != "could" and not whole.unfit and 2 * len(rest) >= len(found):
        without = verdict(rest)
        if without.answer == "could":
            return without, kept
    return whole, kept


def _report(
    candidate: TeacherSpec, tally: _Asked, again: _Asked, agent_usd: Mapping[str, float]
) -> dict[str, Any]:
    """Return the figures of a verdict."""
    whole, kept = told_of(tally.found)
    by_kind = []
    for kind, scored in _by_kind(tally.found):
        told = verdict(scored, usual=len(scored))
        who = "the model" if told.answer == "could" else _WHO[whole.answer]
        by_kind.append({"kind": kind, **asdict(told), "who": "the agent" if kind in kept else who})
    itself = [each for _, each in again.found]
    known = [agent_usd[each] for each in tally.usd if each in agent_usd]
    return {
        "model": candidate.model,
        **asdict(whole),
        "margin": MARGIN,
        "by_kind": by_kind,
        "again": asdict(verdict(itself)) if len(itself) > 1 else None,
        "counts": dict(tally.counts),
        "n_tried": sum(each.is_tried for _, each in tally.found),
        "n_judged": len(tally.found),
        "n_apart": sum(each.differs for _, each in tally.found),
        "usd_per_100": 100 * fmean(tally.usd.values()) if tally.usd else None,
        "agent_usd_per_100": 100 * fmean(known) if known else None,
    }


def words_of(report: Mapping[str, Any]) -> str:
    """Return the verdict in a sentence or two: the model, what it costs, and what to keep the agent for."""
    agent = re.sub(r"-20\d{6}$", "", report["than"])  # the day of a snapshot tells a reader nothing
    name = report["model"] + (" with these instructions" if report["has_instructions"] else "")
    if report["unfit"]:
        return f"{name} could not have done your work: {report['unfit']}. Keep {agent}."
    kinds = [each for each in report["by_kind"] if each["kind"] != _OTHER_KINDS]
    badly = _joined([each["kind"] for each in kinds if each["who"] == "the agent"])
    well = _joined([each["kind"] for each in kinds if each["who"] == "the model"])
    new, old, costs = report["usd_per_100"], report["agent_usd_per_100"], ""
    if new is not None and old:
        saved = f"{abs(100 * (new / old - 1)):.0f} % {'less' if new <= old else 'more'}"
        costs = f" for ${new:.2f} instead of ${old:.2f} per 100 decisions ({saved})"
    n = round(100 * report["difference"])
    right = f"it gets {of_100(report['difference'])} of 100 decisions right {'than' if n else 'as'} {agent}"
    right += f" ({of_100(report['low'])} to {of_100(report['high'])})"
    if report["answer"] == "could":
        again = report["again"]
        if again and again["n"] >= FEWEST and report["difference"] >= again["low"]:
            right += ", no more than it differs from itself"
        some, of_some = (f" except {badly}", "elsewhere, ") if badly else ("", "")
        kept = f"Keep {agent} for {badly}" if badly else f"Nothing speaks for keeping {agent}"
        return f"{name} could have done your work{some}{costs}: {of_some}{right}. {kept}."
    if report["answer"] == "could not":
        able = f" except for {well}, which {name} could do{costs}" if well else ""
        return f"{name} could not have done your work: {right}. Keep {agent}{able}."
    told = f"{report['n']} decisions can't tell whether {name} could have done your work{costs}"
    further = "further ones would hardly tell"
    if more := report["n_more"]:
        usd = more * (report["usd_per_decision"] or 0.0)
        further = f"about {more:,} more would tell, for about ${usd:.2f}"
        if more > report["n_left"]:
            further = f"about {more:,} more would tell, and your sessions have {report['n_left']:,}"
    kept = f"Keep {agent} for {badly} in any case" if badly else f"Until then, keep {agent}"
    return f"{told}: {right}. {kept}; {further}."


def of_100(share: float) -> str:
    """Return a difference of shares as so many fewer or more of 100."""
    n = round(100 * share)
    return f"{abs(n)} {'fewer' if n < 0 else 'more'}" if n else "as many"


def _joined(names: Sequence[str]) -> str:
    return " and ".join(", ".join(names).rsplit(", ", 1))


def _tell_scores(project: Project, model: str, agent: str, tell: Callable[[str], object]) -> None:
    """Pass on what public scores say of a model before anybody is asked, without a network."""
    named = {each.name: each.model for each in project.settings.replay.teachers}
    for words in words_of_scores(agent, {model: named.get(model, model)}):
        tell(words)


def verdict_estimate(
    project: Project,
    model: str,
    *,
    than: str | None,
    cohort: str,
    n_decisions: int,
    tell: Callable[[str], object],
) -> dict[str, Any]:
    """Return what a verdict would cost: at most, and where the panel is asked as often as in the verdicts before."""
    agent, drawn, _ = cohort_of(project, than=than, cohort=cohort, n_decisions=n_decisions)
    _tell_scores(project, model, agent, tell)
    n, n_apart = _ASSUMED_APART
    for receipt in project.receipts.all(stage="verdict"):
        n += receipt.report.get("n_judged", 0)
        n_apart += receipt.report.get("n_apart", 0)
    batches = project.root.batches("states")
    places = sorted(place for run in drawn for place in run)
    with project.teachers(batches) as teachers, who_answers_looks(project, batches) as looks:
        candidate, panel = models_of(project, teachers, model, agent)
        cost = estimate(
            _states(project, places),
            [candidate, *panel],
            ledger=project.settings.ledger_url(),
            looks=looks,
            max_looks=project.settings.replay.max_looks,
            looks_share=ANY_SHARE,
            accepted_terms=_terms([candidate, *panel]),
            **accounts(project),
        )
    own_usd = sum(row.expected_usd for row in cost.teachers if row.teacher == candidate.name)
    return {
        "model": candidate.model,
        "than": agent,
        "panel": [teacher.name for teacher in panel],
        "n_decisions": len(places),
        "share_apart": n_apart / n,
        "expected_usd": own_usd + (cost.expected_usd - own_usd) * n_apart / n,
        "most_usd": cost.expected_usd,
        "teachers": [asdict(row) for row in cost.teachers],
    }
