"""Answer what teachers look for before they act, as the client would have answered it.

A look that the agent made itself, with nothing changed in between, has its recorded answer. A look at files or
commits is answered from the files as they were; commands that only show these run in the sandbox, if it is there.
A list of things to do is always answered alike. What none of these tells is said
to be not available if another call of the message has an answer, and else stays unanswered.
"""

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import msgspec

from replay_pipeline.actions import Action, Call, canonical_action
from replay_pipeline.actions.keys import consequence_of, depend
from replay_pipeline.errors import ConfigError
from replay_pipeline.ingesters import read_manifest
from replay_pipeline.redaction.redactor import Redactor, placeholders_in
from replay_pipeline.settings import redaction_salt
from replay_pipeline.stages.project import Project
from replay_pipeline.stages.work.trials import (
    Hidden,
    is_hidden,
    judge_of,
    names_of,
    restored,
    sandbox_of,
)
from replay_pipeline.stages.work.workspaces import Workspaces, ids_of
from replay_pipeline.types import LookAnswer, Message, TraceState
from replay_pipeline.workspaces.logs import LoggedCall
from replay_pipeline.workspaces.looks import LOOKS_AT_FILES, REFUSED, LookPlace, look_at
from replay_pipeline.workspaces.sandbox import Sandbox
from replay_pipeline.workspaces.verdicts import Judge, StatePlace, TriedCall

_TODOS = (
    "Todos have been modified successfully. Ensure that you continue to use the todo list to track your "
    "progress. Please proceed with the current tasks if applicable"
)
_TASKS = re.compile(r"Task #(\d+) created|Updated task #(\d+) |^#(\d+) \[", re.MULTILINE)
_UNKNOWN = LookAnswer(
    text="<tool_use_error>Not available: this session is replayed, and nobody kept what this call would show. "
    "Go on without it.</tool_use_error>",
    source="unknown",
)
_SHOWN_BEFORE = "File unchanged since last read"


class LoggedLooks:
    """Answers looks at the states of some batches. Their logs are read when the first one is asked for."""

    def __init__(self, project: Project, batches: Iterable[str]) -> None:
        self._project = project
        self._batches = list(batches)
        self._lock = threading.Lock()
        self._positions: dict[str, LookPlace] | None = None
        self._actions: dict[int, Action] = {}
        options = project.settings.workspaces
        self._sandbox: Sandbox | None = None
        with suppress(*() if options.execute == "commands" else (ConfigError,)):
            self._sandbox = sandbox_of(options)
        redacts = project.settings.ingest.is_redacted
        self._redactor = Redactor(salt=redaction_salt()) if redacts else None

    @cached_property
    def _judge(self) -> Judge:
        settings = self._project.settings
        return judge_of(settings.workspaces, kept=settings.local_dir() / "runs.sqlite")

    def close(self) -> None:
        """Let go of the repositories."""
        for at in (self._positions or {}).values():
            if at.history.repository is not None:
                at.history.repository.close()

    def __call__(self, state: TraceState, action: Message) -> list[LookAnswer] | None:
        """Return what each call would have shown, or None where that can't be known of any that looks."""
        with self._lock:
            calls = canonical_action(action, cwd=state.get("cwd")).calls
            answers = [self._answer(state, call) for call in calls]
        is_any = any(each is not None and each.source != "fixed" for each in answers)
        return None if None in answers and not is_any else [each or _UNKNOWN for each in answers]

    def _answer(self, state: TraceState, call: Call) -> LookAnswer | None:
        at = self._position(state)
        if (text := _of_books(call, state["messages"], at)) is not None:
            return LookAnswer(text=text, source="fixed")
        if at is None:
            return None
        names, hide = self._hiding(state, at)
        arguments = restored(call.values(), names)
        if is_hidden(arguments):
            return None
        real = canonical_action(_message(call.name, arguments), cwd=at.step.cwd)
        found = self._seen(at, real) or look_at(at, call.name, arguments, self._sandbox)
        if found is None:
            return None
        return replace(found, text=hide(found.text))

    def _hiding(self, state: TraceState, at: LookPlace) -> tuple[dict[str, str], Hidden]:
        """Return the real names of folders, and what hides them again."""
        names = names_of(state.get("cwd"), at.step.cwd)
        shown = placeholders_in([json.dumps(state["messages"])])
        return names, Hidden(self._redactor, names, at.step.cwd, shown)

    def carried_out(self, state: TraceState, steps: Sequence[Message]) -> list[LookAnswer] | None:
        """Return what the calls of the last of some steps show, the first of which is taken at a state.

        Each is carried out on the files as the steps before it left them. None where that can't be done.
        """
        with self._lock:
            at = self._position(state)
            if at is None:
                return None
            names, hide = self._hiding(state, at)
            calls = [
                c for step in steps for c in canonical_action(step, cwd=state.get("cwd")).calls
            ]
            real = [TriedCall(call.name, restored(call.values(), names)) for call in calls]
            books = [_of_books(call, state["messages"], at) for call in calls]
            run = [call for call, text in zip(real, books, strict=True) if text is None]
            if any(is_hidden(call.arguments) for call in run):
                return None
            shown = self._judge.answers(StatePlace(at.history, at.step), run)
            if shown is None:
                return None
            texts = iter(shown)
            answers = [
                LookAnswer(text=text, source="fixed")
                if text is not None
                else LookAnswer(text=hide(next(texts)), source="run")
                for text in books
            ]
        n_last = len(canonical_action(steps[-1], cwd=state.get("cwd")).calls)
        return answers[len(answers) - n_last :]

    def _position(self, state: TraceState) -> LookPlace | None:
        """Return where a state stands: before its own calls, or else after the last call of its prompt."""
        if self._positions is None:
            self._positions = self._read()
        answered = (m.get("tool_call_id") for m in reversed(state["messages"]))
        keys = (state["state_id"].partition("+")[0], *filter(None, answered))
        return next((self._positions[key] for key in keys if key in self._positions), None)

    def _read(self) -> dict[str, LookPlace]:
        """Return the position of each state in the logs of the batches."""
        sources = [
            source.path
            for batch in self._batches
            for source in read_manifest(batch, self._project.root.path).slices
            if source.path.is_file()
        ]
        found: dict[str, LookPlace] = {}
        if not sources:
            return found
        for log, history in Workspaces(self._project.settings, sources=sources).histories():
            id_of = ids_of(log)
            for order, step in enumerate(log.steps):
                state_id = id_of[step.decision]
                if state_id not in found:
                    history.enter(order, step, is_own_used=True)
                    found[state_id] = LookPlace(history.kept(), order, step, log.steps)
                history.enter(order, step)
                history.take(step)
                after = msgspec.structs.replace(step, call_id="", name="", arguments={})
                history.enter(order + 1, after, is_own_used=True)
                found[step.call_id] = LookPlace(history.kept(), order + 1, step, log.steps)
        return found

    def _seen(self, at: LookPlace, look: Action) -> LookAnswer | None:
        """Return the answer that the log has for the same look, if nothing came between that it depends on."""
        call = look.calls[0]
        for steps in (at.steps[at.order :], reversed(at.steps[: at.order])):
            for step in steps:
                own = self._action(step)
                is_same = step.session == at.step.session and step.agent == at.step.agent
                # The very same: another range of lines has the same effect, and shows something else.
                if is_same and _tells(step) and own == look:
                    return LookAnswer(text=step.text, source="log")
                if not own.is_valid or _changes(own.calls[0], call):
                    break
        return None

    def _action(self, step: LoggedCall) -> Action:
        if id(step) not in self._actions:
            message = _message(step.name, step.arguments)
            self._actions[id(step)] = canonical_action(message, cwd=step.cwd)
        return self._actions[id(step)]


def _message(name: str, arguments: Mapping[str, Any]) -> Message:
    return {"tool_calls": [{"function": {"name": name, "arguments": dict(arguments)}}]}


def _tells(step: LoggedCall) -> bool:
    """Return whether a recorded answer is one that the same call would have had again."""
    is_refusal = step.is_error and not step.text.startswith(REFUSED)
    return bool(step.text) and not is_refusal and not step.text.startswith(_SHOWN_BEFORE)


def _changes(call: Call, look: Call) -> bool:
    """Return whether a call may change what a look shows. Builds and tests leave files alone."""
    return depend(call, look) and not (
        look.name in LOOKS_AT_FILES and consequence_of(call).keeps_files
    )


def _of_books(call: Call, messages: Sequence[Message], at: LookPlace | None) -> str | None:
    """Return what a client always answers to bookkeeping, or None where that depends on the client."""
    values = call.values()
    texts = [str(m.get("content")) for m in messages if m.get("role") == "tool"]
    # A prompt may have lost what the log has.
    before = () if at is None else (s for s in at.steps[: at.order] if s.session == at.step.session)
    own = [step for step in before if step.name.startswith("Task")]
    texts += (step.text for step in own)
    told = {
        number for text in texts for found in _TASKS.findall(text) for number in found if number
    }
    match call.name:
        case "TodoWrite":
            return _TODOS
        case "TaskCreate":
            number = 1 + max(map(int, told), default=0)
            return f"Task #{number} created successfully: {values.get('subject')}"
        case "TaskUpdate" if values.keys() == {"taskId", "status"} and values["taskId"] in told:
            # A client tells what it changes: nothing where the task has that status already.
            calls = (c for m in messages if m.get("tool_calls") for c in canonical_action(m).calls)
            updates = [step.arguments for step in own if step.name == "TaskUpdate"]
            updates += (c.values() for c in calls if c.name == "TaskUpdate")
            mine = (u for u in updates if u.get("taskId") == values["taskId"] and "status" in u)
            *_, last = {}, *mine
            is_other = last.get("status") != values["status"]
            return f"Updated task #{values['taskId']} {'status' * is_other}"
        case "update_plan":
            return "Plan updated"
    return None
