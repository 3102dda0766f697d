"""Ask a model at fixed decisions of one's own sessions, and say whether it could have done the work.

The decisions are drawn once, in proportion to kinds of work and projects, and kept under a name: the next model
meets the same ones. Each is put to the model and to a panel of teachers of other makers, and some to the model that
wrote the sessions, whose difference from itself is the best that any model can reach. Asking ends when
the answer is known, or with the money: if the decisions don't tell, further ones join them.
"""

import hashlib
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from replay_pipeline.actions import Action, canonical_action
from replay_pipeline.actions.votes import read_answer
from replay_pipeline.errors import ConfigError, PriceError
from replay_pipeline.judge.vain import IN_VAIN, looked_in_vain
from replay_pipeline.judge.verdict import MARGIN, USUAL, Scored, judged, verdict
from replay_pipeline.replay import Estimate, estimate, openrouter_name, replay_in_thread
from replay_pipeline.replay.ask.looks import ANY_SHARE
from replay_pipeline.replay.dialects.replies import MALFORMED
from replay_pipeline.stages.pages.costs import turn_usd
from replay_pipeline.stages.pages.public_scores import words_of_scores
from replay_pipeline.stages.project import Project
from replay_pipeline.stages.receipts import Receipt
from replay_pipeline.stages.replay import accounts, who_answers_looks
from replay_pipeline.stages.work.trials import Trials, try_batch
from replay_pipeline.types import TeacherAction, TeacherSpec, TraceState, Trial, family_of_model

_PORTION = 15
"""Decisions that are asked before one looks whether the answer is known."""
_AGAIN = 5
"""One in so many decisions is put to the agent's own model again."""
_MOST_PANEL = 3
_MOST_OVER = 2.0
"""Further decisions are asked if so many times the money that is left should tell: they may tell sooner."""
_FEWEST_OF_KIND = 10
_INSTRUCTIONS = re.compile(
    r"(Contents of \S*CLAUDE\.md \(project instructions[^)]*\):\n\n).*?"
    r"(?=\n+(?:Contents of \S|# currentDate\b|\s*IMPORTANT: this context)|\Z)",
    re.DOTALL,
)
"""Where Claude Code shows a project's own instructions."""


class _Place(NamedTuple):
    """A decision of the sessions: its number among all states, and what it belongs to."""

    number: int
    batch: str
    state_id: str
    session_id: str
    turn_idx: int
    model: str
    kind: str


@dataclass(slots=True)
class _Answers:
    """What the answers to the decisions of a cohort tell."""

    found: list[tuple[str, Scored]] = field(default_factory=list)
    """The kind of each judged decision, and what was judged."""
    again: list[Scored] = field(default_factory=list)
    """The agent's own model, asked again, in the candidate's place."""
    counts: Counter[str] = field(default_factory=Counter)
    usd: list[float] = field(default_factory=list)
    agent_usd: list[float] = field(default_factory=list)


def verdict_run(
    project: Project,
    model: str,
    *,
    max_total_usd: float,
    than: str | None = None,
    cohort: str = "default",
    n_decisions: int = USUAL,
    instructions: str | None = None,
    tell: Callable[[str], None] | None = None,
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
        ConfigError: there are no decisions of `than`, or too few teachers of other makers.
        PriceError: a price is not known. Nothing was paid.
    """
    started = time.perf_counter()
    agent, drawn, rest = cohort_of(project, than=than, cohort=cohort, n_decisions=n_decisions)
    places = [*drawn, *rest]
    if tell is not None:
        for words in _prior_words(project, model, agent):
            tell(words)
    tally = _Answers()
    spent, ended = 0.0, "all decisions were asked"
    with project.teachers(project.root.batches("states")) as teachers:
        candidate, panel = models_of(project, teachers, model, agent)
        asks_again = project.settings.played is None
        costs = _agent_costs(project, places)
        for start in range(0, len(places), _PORTION):
            portion = sorted(places[start : start + _PORTION])
            # First, since it may find that the instructions have no place.
            answers, paid, is_over = _ask(
                project, portion, [candidate], max_total_usd - spent, instructions
            )
            spent += paid
            others, paid, is_out = _ask(project, portion, panel, max_total_usd - spent)
            answers, spent, is_over = answers | others, spent + paid, is_over or is_out
            if asks_again:
                again, paid, asks_again = _ask_again(
                    project, places[start : start + _PORTION : _AGAIN], agent, max_total_usd - spent
                )
                answers |= again
                spent += paid
            _judge(project, portion, candidate, panel, answers, tally, costs)
            if is_over:
                ended = "the money was spent"
                break
            found = verdict(each for _, each in tally.found)
            if found.answer != "can't tell":
                ended = "the answer was known"
                break
            n_asked = start + len(portion)
            worth_usd = _MOST_OVER * (max_total_usd - spent)
            is_in_reach = found.n_more and found.n_more * spent / n_asked <= worth_usd
            if n_asked >= len(drawn) and not is_in_reach:
                ended = "the money left would hardly tell"
                break
    asked = places[: start + len(portion)] if places else []
    if len(asked) > len(drawn):
        _keep(project, cohort, agent, asked)
    report = _report(candidate, tally) | {
        "has_instructions": instructions is not None,
        "cohort": cohort,
        "panel": [teacher.name for teacher in panel],
        "spent_usd": round(spent, 6),
        "unspent_usd": round(max_total_usd - spent, 6),
        "usd_per_decision": spent / len(asked) if asked else None,
        "ended": f"{ended} ({len(asked)} of {max(len(drawn), len(asked))} decisions)",
        "is_play": project.settings.played is not None,
        "than": agent,
    }
    # A page shows the sentence alone.
    report["words"] = ("Made-up answers: " if report["is_play"] else "") + words_of(report)
    return project.receipts.write(
        Receipt(
            stage="verdict",
            batch=_name(cohort, candidate.model + (instructions or "")),
            version=1,
            report=report,
            seconds=round(time.perf_counter() - started, 3),
        )
    )


def _name(cohort: str, model: str = "") -> str:
    """Return a name for a file of a cohort."""
    return f"{cohort}-{hashlib.sha256(model.encode()).hexdigest()[:8]}" if model else cohort


def cohort_of(
    project: Project, *, than: str | None, cohort: str, n_decisions: int
) -> tuple[str, list[_Place], list[_Place]]:
    """Return who made the decisions of a cohort, these in the order of asking, and that model's others.

    A new cohort is drawn and kept. Decisions that are no longer there are left out.

    Raises:
        ConfigError: no decision is of `than`, or the cohort is of another model.
    """
    places = list(_places(project))
    if kept := project.receipts.read("verdict", _name(cohort)):
        if than and than != kept.report["than"]:
            raise ConfigError(
                f"the cohort {cohort!r} has decisions of {kept.report['than']}: name another one with --cohort"
            )
        known = {place.state_id: place for place in places}
        agent, named = kept.report["than"], kept.report["states"]
        return agent, [known[s] for s in named if s in known], _others(places, agent, named)
    by_model = Counter(place.model for place in places)
    agent = than or max(by_model, key=lambda name: (by_model[name], name), default=None)
    own = [place for place in places if place.model == agent]
    if agent is None or not own:
        wrote = ", ".join(name for name, _ in by_model.most_common(5)) or "nobody"
        raise ConfigError(
            f"no decision of {than or 'a model'} was found; these wrote some: {wrote}"
        )
    # Every so many of those that are sorted by kind: each kind and each session gets its share.
    own.sort(key=lambda place: (place.kind, _hashed(place.session_id), place.turn_idx))
    step = max(1.0, len(own) / n_decisions)
    drawn = [own[int(number * step)] for number in range(min(n_decisions, len(own)))]
    drawn.sort(key=lambda place: _hashed(place.state_id))
    _keep(project, cohort, agent, drawn)
    return agent, drawn, _others(own, agent, [place.state_id for place in drawn])


def _keep(project: Project, cohort: str, agent: str, places: Sequence[_Place]) -> None:
    """Keep which decisions a cohort has."""
    report = {"than": agent, "states": [place.state_id for place in places]}
    project.receipts.write(
        Receipt(stage="verdict", batch=_name(cohort), version=1, report=report, seconds=0.0)
    )


def _others(places: Iterable[_Place], agent: str, named: Iterable[str]) -> list[_Place]:
    """Return a model's decisions that are not named, in an order that has nothing to do with them."""
    left_out = set(named)
    own = (place for place in places if place.model == agent and place.state_id not in left_out)
    return sorted(own, key=lambda place: _hashed(place.state_id))


def _hashed(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _places(project: Project) -> Iterator[_Place]:
    """Yield the decisions at which teachers are asked."""
    columns = ["state_id", "session_id", "turn_idx", "student_model", "action_tool_calls_json"]
    number = 0
    for batch in project.root.batches("states"):
        rows = project.root.read("states", batch, columns=columns).to_pylist()
        for row, why in zip(rows, project.not_asked(batch), strict=True):
            if why is None and row["student_model"]:
                calls = msgspec.json.decode(row["action_tool_calls_json"] or "[]")
                kind = calls[0]["function"]["name"] if calls else "answers"
                state_id, session_id, turn_idx, model = (row[name] for name in columns[:4])
                yield _Place(number, batch, state_id, session_id, turn_idx, model, kind)
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
    """Ask at some decisions. Returns the answers by state and teacher, what was paid, and whether money ended.

    Raises:
        ConfigError: there are instructions, and none of the prompts has a place for them.
    """
    states = _states(project, places)
    if instructions is not None:
        shown = list(states)
        states = [instructed(state, instructions) for state in shown]
        if states == shown:
            raise ConfigError(
                "no prompt of these decisions shows a CLAUDE.md of the project, so other instructions have no place"
            )
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


def _ask_again(
    project: Project, places: Sequence[_Place], agent: str, max_usd: float
) -> tuple[dict[tuple[str, str], TeacherAction], float, bool]:
    """Ask the agent's own model again; the last value is whether that is possible."""
    model = openrouter_name(agent)
    spec = _asked_as(project, f"control:{model}", model)
    try:
        answers, paid, _ = _ask(project, sorted(places), [spec], max_usd)
    except (ConfigError, PriceError):
        return {}, 0.0, False
    return {(state, "again"): each for (state, _), each in answers.items()}, paid, True


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


def _judge(
    project: Project,
    places: Sequence[_Place],
    candidate: TeacherSpec,
    panel: Sequence[TeacherSpec],
    answers: Mapping[tuple[str, str], TeacherAction],
    tally: _Answers,
    agent_usd: Mapping[str, float],
) -> None:
    """Judge the answers at some decisions, tried where the settings let actions be executed."""
    states = _states(project, places)
    trials: Trials = {}
    for batch in {place.batch for place in places}:
        own = {place.state_id for place in places if place.batch == batch}
        trials |= try_batch(
            project, batch, [a for a in answers.values() if a.state_id in own]
        ).trials
    for place, state in zip(places, states, strict=True):
        own = answers.get((place.state_id, candidate.name))
        if own is None:
            tally.counts["not asked"] += 1
            continue
        others = [
            action
            for teacher in panel
            if (row := answers.get((place.state_id, teacher.name))) is not None
            and (action := _read(row, state)) is not None
            and action.is_valid
        ]
        agent = canonical_action(state["student_action"], cwd=state.get("cwd"))
        action = _read(own, state)
        if action is None:
            tally.counts["failed"] += 1
            continue
        if len(others) < 2:
            tally.counts["with too few answers of the panel"] += 1
            continue
        shown = state.get("tools") or (), state["messages"]
        tried = _credible(trials.get(place.state_id), agent, state)
        kind = IN_VAIN if looked_in_vain(state) else place.kind
        tally.found.append((kind, judged(action, agent, others, *shown, tried=tried)))
        tally.usd.append(own.cost_usd)
        if (usd := agent_usd.get(place.state_id)) is not None:
            tally.agent_usd.append(usd)
        again = answers.get((place.state_id, "again"))
        if again is not None and (repeated := _read(again, state)) is not None:
            tally.again.append(judged(repeated, agent, others, *shown, tried=tried))


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


def _report(candidate: TeacherSpec, tally: _Answers) -> dict[str, Any]:
    """Return the figures of a verdict."""
    kinds: dict[str, list[Scored]] = defaultdict(list)
    for kind, each in tally.found:
        kinds[kind].append(each)
    by_kind = [
        {"kind": kind, **asdict(verdict(found))}
        for kind, found in sorted(kinds.items(), key=lambda each: (-len(each[1]), each[0]))
    ]
    return {
        "model": candidate.model,
        **asdict(verdict(each for _, each in tally.found)),
        "margin": MARGIN,
        "by_kind": by_kind,
        "again": asdict(verdict(tally.again)) if len(tally.again) > 1 else None,
        "counts": dict(tally.counts),
        "n_tried": sum(each.is_tried for _, each in tally.found),
        "usd_per_100": 100 * fmean(tally.usd) if tally.usd else None,
        "agent_usd_per_100": 100 * fmean(tally.agent_usd) if tally.agent_usd else None,
    }


def words_of(report: Mapping[str, Any]) -> str:
    """Return the verdict in a sentence or two: the model, what it costs, and what to keep the agent for."""
    agent = report["than"]
    name = report["model"] + (" with these instructions" if report["has_instructions"] else "")
    kinds = [each for each in report["by_kind"] if each["n"] >= _FEWEST_OF_KIND]
    well = _joined([each["kind"] for each in kinds if each["difference"] > -MARGIN])
    badly = _joined([each["kind"] for each in kinds if each["difference"] <= -MARGIN])
    new, old, costs = report["usd_per_100"], report["agent_usd_per_100"], ""
    if new is not None and old:
        costs = f" for ${new:.2f} instead of ${old:.2f} per 100 decisions ({100 * (new / old - 1):+.0f} %)"
    if report["unfit"]:
        return f"{name} could not have done your work: {report['unfit']}. Keep {agent}."
    right = f"of 100 decisions it gets {of_100(report['difference'])} right than {agent}"
    right = right.replace("as many right than", "as many right as")
    right += f" ({of_100(report['low'])} to {of_100(report['high'])})"
    if report["answer"] == "could":
        again = report["again"]
        if again and again["n"] >= _FEWEST_OF_KIND and report["difference"] >= again["low"]:
            right += ", no more than it differs from itself"
        kept = f" Keep {agent} for {badly}." if badly else ""
        return (
            f"{name} could have done your {well + ' ' if well else ''}work{costs}: {right}.{kept}"
        )
    if report["answer"] == "could not":
        able = f", but for {well}, where it comes near{costs}" if well and badly else ""
        return f"{name} could not have done your work: {right}. Keep {agent}{able}."
    more = report["n_more"]
    further = "Further ones would hardly tell."
    if more:
        usd = more * (report["usd_per_decision"] or 0.0)
        further = f"About {more} more would tell, for about ${usd:.2f}."
    told = f"{report['n']} decisions can't tell whether {name} could have done your work{costs}"
    return f"{told}: {right}. {further}"


def of_100(share: float) -> str:
    """Return a difference of shares as so many fewer or more of 100."""
    n = round(100 * share)
    return f"{abs(n)} {'fewer' if n < 0 else 'more'}" if n else "as many"


def _joined(names: Sequence[str]) -> str:
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _prior_words(project: Project, model: str, agent: str) -> list[str]:
    """Return what public scores say of a model before anybody is asked, without a network."""
    named = {each.name: each.model for each in project.settings.replay.teachers}
    return words_of_scores(agent, {model: named.get(model, model)})


def verdict_estimate(
    project: Project,
    model: str,
    *,
    than: str | None,
    cohort: str,
    n_decisions: int,
    tell: Callable[[str], None],
) -> Estimate:
    """Return what a verdict would cost. `tell` is given what is known for free."""
    agent, places, _ = cohort_of(project, than=than, cohort=cohort, n_decisions=n_decisions)
    for words in _prior_words(project, model, agent):
        tell(words)
    with project.teachers(project.root.batches("states")) as teachers:
        candidate, panel = models_of(project, teachers, model, agent)
        return estimate(
            _states(project, sorted(places)),
            [candidate, *panel],
            ledger=project.settings.ledger_url(),
            accepted_terms=_terms([candidate, *panel]),
            **accounts(project),
        )
