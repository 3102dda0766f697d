"""Try the actions of the agent and the teachers, on copies of the files as they were.

Teachers saw redacted prompts, so their actions name redacted folders. These get their real names
back. If an action may have failed because of redaction, it doesn't count as tried.
"""

import json
import logging
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from replay_pipeline.actions import canonical_action
from replay_pipeline.ingesters import read_manifest
from replay_pipeline.judge.answers import AGENT
from replay_pipeline.judge.feasibility import texts_in
from replay_pipeline.redaction.people import user_of
from replay_pipeline.redaction.redactor import Redactor, placeholders_in
from replay_pipeline.settings import WorkspaceSettings, redaction_salt
from replay_pipeline.stages.project import Project
from replay_pipeline.stages.work.workspaces import Workspaces, ids_of
from replay_pipeline.types import Message, TeacherAction, TraceState, Trial
from replay_pipeline.workspaces.history import History
from replay_pipeline.workspaces.logs import Log
from replay_pipeline.workspaces.sandbox import CommandLimits, Sandbox
from replay_pipeline.workspaces.verdicts import CandidateResult, Judge, StatePlace, TriedCall

logger = logging.getLogger(__name__)

_PLACEHOLDER = re.compile(r"<[A-Z]+:[\w-]+:[0-9a-f]+>")

Trials = dict[str, dict[str, Trial]]
"""The results of tried actions, by state and rendered action."""


def sandbox_of(options: WorkspaceSettings) -> Sandbox:
    """Return the sandbox of the settings.

    Raises:
        ConfigError: this machine can't run a sandbox.
    """
    limits = CommandLimits(
        timeout_s=options.timeout_s,
        memory_bytes=options.max_memory_bytes,
        disk_bytes=options.max_disk_bytes,
        n_processes=options.max_processes,
    )
    return Sandbox(limits=limits, mounts=options.mounts)


def judge_of(options: WorkspaceSettings, *, kept: Path | None = None) -> Judge:
    """Return the judge of actions under these settings.

    Raises:
        ConfigError: the settings let commands run, but this machine can't run a sandbox.
    """
    sandbox = sandbox_of(options) if options.execute == "commands" else None
    return Judge(options.execute, sandbox=sandbox, kept=kept, checks=options.checks)


def try_batch(
    project: Project, batch: str, answers: Sequence[TeacherAction]
) -> tuple[Trials, dict[str, int]]:
    """Try the actions at a batch's states, as far as the settings allow, and return results and counts."""
    settings, options = project.settings, project.settings.workspaces
    if options.execute == "off":
        return {}, {}
    manifest = read_manifest(batch, project.root.path)
    sources = [source.path for source in manifest.slices if source.path.is_file()]
    if not sources:
        logger.warning("%s: its logs are gone, so none of its actions is executed", batch)
        return {}, {"n_states": 0}
    return try_actions(
        Workspaces(settings, sources=sources),
        judge_of(options, kept=settings.local_dir() / "runs.sqlite"),
        project.states([batch]),
        answers,
        redactor=Redactor(salt=redaction_salt()) if settings.ingest.is_redacted else None,
    )


def try_actions(
    workspaces: Workspaces,
    judge: Judge,
    states: Iterable[TraceState],
    answers: Sequence[TeacherAction],
    *,
    redactor: Redactor | None = None,
) -> tuple[Trials, dict[str, int]]:
    """Try the agent's action and every teacher's at each state that has answers.

    Returns the results and counts: `n_states` found in the logs, `n_tried` actions, `n_would_fail`
    among them, `n_not_known` without a result, `n_run` commands and, if checks were run, the
    actions that they `n_checked` and `n_fixed`.
    """
    asked: dict[str, list[TeacherAction]] = defaultdict(list)
    for row in answers:
        if row.action is not None and row.error_code is None:
            asked[row.state_id].append(row)
    wanted: dict[str, tuple[str | None, Message]] = {}
    shown: dict[str, str] = {}
    for state in states:
        if state["state_id"] in asked:
            wanted[state["state_id"]] = state.get("cwd"), state["student_action"]
            shown |= placeholders_in([json.dumps(state["messages"])])
    trials: Trials = {}
    counts: Counter[str] = Counter(n_states=0, n_tried=0, n_would_fail=0, n_not_known=0)
    for log, history in workspaces.histories():
        for state_id, place, own in _places(log, history, wanted):
            counts["n_states"] += 1
            cwd, message = wanted[state_id]
            found = trials.setdefault(state_id, {})
            names = names_of(cwd, place.cwd)
            recorded = canonical_action(message, cwd=cwd).render()
            work: dict[str, Callable[[], CandidateResult]] = {
                recorded: partial(judge.judge, place, own)
            }
            for row in asked[state_id]:
                action = canonical_action(row.action or {}, cwd=cwd)
                if action.is_valid:
                    calls = [TriedCall(call.name, call.values()) for call in action.calls]
                    judged = partial(_judged, judge, place, calls, names)
                    work.setdefault(action.render(), judged)
            for rendered, verdict in zip(
                work, _at_once(judge, place, list(work.values())), strict=True
            ):
                if verdict.status == "not_known":
                    counts["n_not_known"] += 1
                    continue
                trial = found[rendered] = _trial(verdict, Hidden(redactor, names, place.cwd, shown))
                counts["n_tried"] += 1
                counts["n_would_fail"] += not trial.works
                if judge.checks:
                    counts["n_checked"] += trial.check is not None
                    counts["n_fixed"] += trial.check == "fixed"
    counts["n_run"] = judge.n_run
    return trials, dict(counts)


class Hidden:
    """What may be kept of a text: people and secrets are taken out, as in what teachers see."""

    def __init__(
        self,
        redactor: Redactor | None,
        names: Mapping[str, str],
        cwd: str | None,
        shown: Mapping[str, str],
    ) -> None:
        self._shown = shown
        self._redactor = redactor
        self._names = {real: told for told, real in names.items()}
        self._users = frozenset(filter(None, [user_of(cwd)]))

    def __call__(self, text: str) -> str:
        """Return a text as it may be kept and sent."""
        text = restored(text, self._names)
        if self._redactor is None:
            return text
        return self._redactor.masked(text, self._shown, users=self._users)


def _trial(verdict: CandidateResult, hidden: Callable[[str], str]) -> Trial:
    checked = verdict.checked
    return Trial(
        works=verdict.status == "works",
        error_kind=verdict.error_kind,
        effect=verdict.effect,
        was_passing=checked.was_passing if checked else None,
        is_passing=checked.is_passing if checked else None,
        answer=hidden(verdict.answer),
        diff=hidden(verdict.diff),
    )


def verdicts_of(
    trials: Trials, states: Iterable[TraceState], answers: Iterable[TeacherAction]
) -> dict[tuple[str, str], bool]:
    """Return which actions are known to be wrong or right, by state and candidate.

    An action that its tool refuses is wrong. An action that works may still be wrong, so nothing is
    known about it. But if the tool refuses the agent's own action, an action that works is better.
    If the project's check fails before an action and passes after it, the action is right.
    """
    cwds: dict[str, str | None] = {}
    found: dict[tuple[str, str], bool] = {}

    def note(state_id: str, candidate: str, message: Message | str) -> None:
        rendered = canonical_action(message, cwd=cwds[state_id]).render()
        trial = trials[state_id].get(rendered)
        if trial is None:
            return
        if not trial.works:
            found[state_id, candidate] = False
        elif trial.check == "fixed" or found.get((state_id, AGENT)) is False:
            found[state_id, candidate] = True

    for state in states:
        if state["state_id"] in trials:
            cwds[state["state_id"]] = state.get("cwd")
            note(state["state_id"], AGENT, state["student_action"])
    for row in answers:
        if row.state_id in cwds and row.action is not None and row.error_code is None:
            note(row.state_id, row.teacher, row.action)
    return found


def _at_once(
    judge: Judge, place: StatePlace, work: Sequence[Callable[[], CandidateResult]]
) -> Iterable[CandidateResult]:
    """Judge the candidates of a state: where commands run, as many at once as there are cores."""
    if judge.execute != "commands":
        return [each() for each in work]
    place.files()  # put together once, before anybody needs them at the same time
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda each: each(), work))


def _places(
    log: Log, history: History, wanted: Mapping[str, Any]
) -> Iterator[tuple[str, StatePlace, list[TriedCall]]]:
    """Yield each wanted state of a log as a place, with the calls that the agent made there."""
    id_of = ids_of(log)
    calls: dict[str, list[TriedCall]] = defaultdict(list)
    for step in sorted(log.steps, key=lambda step: step.called):
        calls[step.decision].append(TriedCall(step.name, step.arguments))
    seen: set[str] = set()
    for order, step in enumerate(log.steps):
        state_id = id_of[step.decision]
        if state_id in wanted and state_id not in seen:
            seen.add(state_id)
            history.enter(order, step, is_own_used=True)
            yield state_id, StatePlace(history, step), calls[step.decision]
        history.enter(order, step)
        history.take(step)


def names_of(told: str | None, real: str | None) -> dict[str, str]:
    """Return folders whose names were redacted: what prompts call them, and what they are called here."""
    if told is None or real is None or told == real:
        return {}
    one, other = told.split("/"), real.split("/")
    if len(one) != len(other):
        return {told: real}
    return {
        "/".join(one[: i + 1]) + "/": "/".join(other[: i + 1]) + "/"
        for i in range(len(one))
        if one[i] != other[i]
    } | {told: real}


def _judged(
    judge: Judge, place: StatePlace, calls: list[TriedCall], names: Mapping[str, str]
) -> CandidateResult:
    """Judge an action that was written to a redacted prompt."""
    real = [TriedCall(call.name, restored(call.arguments, names)) for call in calls]
    if any(is_hidden(call.arguments) for call in real):
        return CandidateResult("not_known")
    verdict = judge.judge(place, real)
    if verdict.error_kind in {"string_not_found", "not_found"} and names:
        # Were names in the file redacted, the text that was asked for could not be found.
        people = {a: b for told, mine in names.items() for a, b in _differences(told, mine)}
        if any(
            told in text for told in people for call in real for text in texts_in(call.arguments)
        ):
            return CandidateResult("not_known")
    return verdict


def _differences(told: str, real: str) -> Iterator[tuple[str, str]]:
    for one, other in zip(told.split("/"), real.split("/"), strict=False):
        if one != other and one:
            yield one, other


def is_hidden(arguments: Any) -> bool:
    """Return whether arguments name something that was redacted."""
    return any(_PLACEHOLDER.search(text) for text in texts_in(arguments))


def restored(value: Any, names: Mapping[str, str]) -> Any:
    """Return arguments with the real names of folders."""
    if isinstance(value, str):
        for told in sorted(names, key=len, reverse=True):
            value = value.replace(told, names[told])
        return value
    if isinstance(value, list):
        return [restored(each, names) for each in value]
    if isinstance(value, dict):
        return {key: restored(each, names) for key, each in value.items()}
    return value
