"""The stage that asks teachers, the only one that spends money."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from replay_pipeline.actions import canonical_action
from replay_pipeline.errors import ConfigError
from replay_pipeline.replay import (
    NOT_ASKED,
    AskingOptions,
    refuse_if_nobody_answers,
    replay_facts,
    replay_in_thread,
)
from replay_pipeline.replay.ask.looks import AnswerLooks
from replay_pipeline.replay.ask.rows import teacher_actions_from_table, teacher_actions_table
from replay_pipeline.replay.dialects.base import RequestOptions
from replay_pipeline.replay.dialects.requests import RequestBuilder
from replay_pipeline.settings import Settings, redaction_salt
from replay_pipeline.stages.audit import tables
from replay_pipeline.stages.receipts import Overview, Receipt, added, total
from replay_pipeline.stages.shown import shown_below
from replay_pipeline.stages.stage import Check, Report, Stage, Task
from replay_pipeline.stages.work.continuing import WentOn, continued
from replay_pipeline.stages.work.markdown import bars, markdown_table, quantile
from replay_pipeline.stages.work.redacting import PROMPT_TEXTS, masked_answers
from replay_pipeline.storage.store import Place
from replay_pipeline.types import Progress, ReplayReport, TeacherSpec, TraceState

if TYPE_CHECKING:
    from replay_pipeline.stages.project import Project

_RULES = {"agreement_threshold", "level", "count_own_family"}
"""The settings of pairs by which a gate finds that a state can have none; see `Project.options`."""


def ask_teachers(
    task: Task, *, max_total_usd: float | None = None, night: str | None = None
) -> Report:
    """Ask teachers at the states of a batch, paying at most `max_total_usd` for new answers.

    If the stage stops before every question is asked, the next run continues. The ceiling is by
    default the one in the settings. With 0, only answers from the ledger are used. All calls of one
    `night`, over all its runs, cost at most `max_nightly_usd`.

    Raises:
        ConfigError: a teacher can't be used, or no step behind a vote may be carried out.
    """
    project, batch = task.project, task.batch
    if project.settings.replay.steps_after and project.settings.workspaces.execute == "off":
        raise ConfigError(
            "replay.steps_after: no action may be carried out; set workspaces.execute to `files` or `commands`"
        )
    if max_total_usd is None:
        max_total_usd = project.settings.replay.max_total_usd
    tell = project.tell_part(batch)
    states = project.asked_states([batch])
    not_asked = Counter(why for why in project.not_asked(batch) if why is not None)
    with project.teachers([batch]) as teachers, who_answers_looks(project, [batch]) as looks:
        report = replay_in_thread(
            states,
            teachers,
            max_total_usd=max_total_usd,
            counts_recorded=False,
            partition=batch,
            tick=tell,
            ledger=project.settings.ledger_url(),
            looks=looks,
            **asking_options(project, night),
        )
        went_on = steps_after(task, states, report, teachers, max_total_usd, night)
    left = sum(n for why, n in report.skipped.items() if why in NOT_ASKED)
    n_total = len(report.actions) + sum(report.skipped.values())
    spent_usd = report.newly_spent_usd
    tell(Progress(stage="replay", n_done=n_total - left, n_total=n_total, cost_usd=spent_usd))
    actions = [*report.actions, *went_on.actions]
    if project.settings.ingest.is_redacted:
        prompts = [
            project.root.read(name, batch, columns=names) for name, names in PROMPT_TEXTS.items()
        ]
        actions = masked_answers(actions, prompts, salt=redaction_salt())
    task.write("teacher_actions", teacher_actions_table(actions))
    refuse_if_nobody_answers(report)
    told = {f"n_states_{why}": n for why, n in not_asked.items()}
    facts = {**replay_facts(report), **told, **({"night": night} if night else {})}
    if project.settings.replay.steps_after:
        facts |= {
            "n_after": len(went_on.actions),
            "spent_usd": round(report.spent_usd + went_on.cost_usd, 9),
            "newly_spent_usd": round(spent_usd + went_on.paid_usd, 9),
            "is_complete": facts["is_complete"] and went_on.is_complete,
        }
    return facts


def steps_after(
    task: Task,
    states: Sequence[TraceState],
    report: ReplayReport,
    teachers: Sequence[TeacherSpec],
    max_total_usd: float,
    night: str | None,
) -> WentOn:
    """Let teachers go on behind their votes, for what the votes have left of the money."""
    from replay_pipeline.stages.work.looks import LoggedLooks

    project, batch = task.project, task.batch
    if not (n_steps := project.settings.replay.steps_after):
        return WentOn()
    named = {teacher.name: teacher for teacher in teachers}
    options = asking_options(project, night)
    options["gates"] = ()

    def ask(teacher: str, prompts: Sequence[TraceState], max_usd: float) -> ReplayReport:
        return replay_in_thread(
            prompts,
            [named[teacher]],
            max_total_usd=max_usd,
            counts_recorded=False,
            partition=batch,
            ledger=project.settings.ledger_url(),
            **options,
        )

    left_usd = max_total_usd - report.newly_spent_usd - report.unknown_usd
    with closing(LoggedLooks(project, [batch])) as logged:
        return continued(
            states, report.actions, logged.carried_out, ask, n_steps=n_steps, max_usd=left_usd
        )


def accounts(project: "Project", night: str | None = None) -> AskingOptions:
    """Return the ceilings and price lists that all paying calls share."""
    replay = project.settings.replay
    limits = {"day": replay.max_daily_usd, "night": replay.max_nightly_usd if night else None}
    return {
        "night": night,
        "limits_usd": {scope: usd for scope, usd in limits.items() if usd is not None},
        "price_folder": price_folder(project),
    }


@contextmanager
def who_answers_looks(project: "Project", batches: Iterable[str]) -> Iterator[AnswerLooks | None]:
    """Answer what teachers look for at the states of some batches, if the settings ask on."""
    from replay_pipeline.stages.work.looks import LoggedLooks

    if not _asks_on(project.settings):
        yield None
        return
    with closing(LoggedLooks(project, batches)) as looks:
        yield looks


def asking_options(project: "Project", night: str | None = None) -> AskingOptions:
    """Return the options that decide the questions of a replay."""
    replay, pairs = project.settings.replay, project.settings.pairs
    return {
        "max_looks": replay.max_looks,
        "looks_share": replay.looks_share,
        **accounts(project, night),
        "max_concurrency": replay.max_concurrency,
        "gates": replay.gates,
        "agreement_threshold": pairs.agreement_threshold,
        "level": pairs.level,
        "count_own_family": pairs.count_own_family,
        "min_p_better": pairs.min_p_better,
        "accepted_terms": replay.accepted_terms,
        "retry": replay.retry,
    }


def _looks_by(settings: Settings) -> Mapping[str, Any]:
    """Return what decides how often teachers may look, and what they then see."""
    runs = {"workspaces.execute": "commands"} if settings.workspaces.execute == "commands" else {}
    limits = {
        f"replay.{name}": getattr(settings.replay, name) for name in ("max_looks", "looks_share")
    }
    repositories = list(map(str, settings.workspaces.repositories))
    return {**limits, **runs, **({"workspaces.repositories": repositories} if repositories else {})}


def _asks_on(settings: Settings) -> bool:
    """Return whether teachers that only look are asked on."""
    return settings.replay.ask_at == "consequences"


def price_folder(project: "Project") -> Place | None:
    """Return the folder of price lists. A local server gets a new one each time."""
    return None if project.settings.played else project.root.path / "prices"


def asked(teachers: Sequence[TeacherSpec]) -> Mapping[str, Any]:
    """Return the fields of teachers that decide their answers, without address, key, price, and speed."""
    left_out = {"answers_as", "base_url", "api_key_env", "price", "max_concurrency", "timeout_s"}
    return {
        teacher.name: teacher.model_dump(mode="json", exclude=left_out | {"name"})
        for teacher in teachers
    }


def _decisive(settings: Settings) -> Mapping[str, Any]:
    teachers, gates = settings.teachers(), settings.replay.gates
    return {
        "replay.teachers": [teacher.name for teacher in teachers],
        **{f"replay.teachers.{name}": spec for name, spec in asked(teachers).items()},
        "replay.gates": gates,
        "replay.ask_at": settings.replay.ask_at,
        **(_looks_by(settings) if _asks_on(settings) else {}),
        **(
            {"replay.steps_after": n, "workspaces.execute": settings.workspaces.execute}
            if (n := settings.replay.steps_after)
            else {}
        ),
        **({"replay.asks_incomplete": True} if settings.replay.asks_incomplete else {}),
        "replay.played": settings.played,
        **shown_below(settings),
        # Gates stop where the outcome can no longer change.
        **({"pairs": settings.pairs.model_dump(mode="json", include=_RULES)} if gates else {}),
    }


def _figures(receipts: Sequence[Receipt]) -> Mapping[str, Any]:
    """Add up the replays; what was made up in a rehearsal is in no sum of real answers."""
    real = [receipt for receipt in receipts if not is_play(receipt.report)]
    fresh = [receipt for receipt in receipts if not receipt.is_reused]
    return {
        "calls": total([receipt for receipt in real if not receipt.is_reused], "n_sent"),
        "answers": total(real, "n_answers"),
        "failed_calls": total(real, "n_failed"),
        "only_looked": total(real, "n_only_looked"),
        "answered_by_others": _others(real),
        "rehearsed_answers": total(receipts, "n_rehearsed"),
        "spent_usd": round(total(receipts, "spent_usd"), 6),
        "newly_spent_usd": round(total(fresh, "newly_spent_usd"), 6),
    }


def _others(receipts: Sequence[Receipt]) -> Mapping[str, Mapping[str, int]]:
    """Count the answers of other models than the asked one, by teacher."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for receipt in receipts:
        for name, counts in (receipt.report.get("answered_by_others") or {}).items():
            found[name].update(counts)
    return found


def is_play(replay: Mapping[str, Any]) -> bool:
    """Return whether the answers in a replay's report come from a rehearsal."""
    return bool(replay.get("n_rehearsed"))


def open_work(replays: Sequence[Mapping[str, Any]], *, n_states_waiting: int = 0) -> dict[str, Any]:
    """Return the open questions of the replays, why they are open, and the cost to finish them.

    Returns:
        The calls that are left and their cost in US dollars, as `what_is_left` told them at the
        end of each replay; why replays ended; and failed calls by error. States at
        which no real teacher was ever asked are counted beside them: `estimate` prices these.
        Made-up answers of a rehearsal count nowhere else.
    """
    played = [report for report in replays if is_play(report)]
    replays = [report for report in replays if not is_play(report)]
    n_states_waiting += sum(report.get("n_states", 0) for report in played)
    lefts = [report["left"] for report in replays if report.get("left")]
    # Without a price nobody could estimate: then every question counts that wasn't asked.
    unpriced = [report for report in replays if not report.get("left")]
    skipped = added(report.get("skipped", {}) for report in unpriced)
    n_unpriced = sum(skipped.get(reason, 0) for reason in NOT_ASKED)
    stopped = [report.get("stop_reason", "unknown") for report in replays]
    return {
        "n_questions_left": sum(left["n_calls"] for left in lefts) + n_unpriced,
        "left_usd": round(sum(left["expected_usd"] for left in lefts), 9) if lefts else None,
        "stop_reasons": {reason: stopped.count(reason) for reason in dict.fromkeys(stopped)},
        "errors": added(report.get("errors", {}) for report in replays),
        "n_answers": sum(report["n_answers"] for report in replays),
        "n_states_never_asked": n_states_waiting,
        "n_rehearsed": sum(report["n_rehearsed"] for report in played),
    }


def answer_facts(_: Overview, receipt: Receipt) -> Mapping[str, Any]:
    """Return the calls, dollars, latencies, and failures of a batch."""
    report = receipt.report
    latencies = sorted(report["latency_s"])
    marks = {name: quantile(latencies, share) for name, share in (("p50", 0.5), ("p95", 0.95))}
    by_teacher = report["cost_by_teacher_usd"]
    return {
        "dagster/partition_row_count": report["n_answers"]
        + report["n_failed"]
        + report.get("n_only_looked", 0),
        **({"made up in a rehearsal": n} if (n := report.get("n_rehearsed")) else {}),
        "calls_sent": 0 if receipt.is_reused else report["n_sent"],
        "usd": report["spent_usd"],
        "usd_budget": report["max_total_usd"],
        "usd_per_answer": report["spent_usd"] / max(1, report["n_answers"]),
        **{f"usd {teacher}": usd for teacher, usd in sorted(by_teacher.items())},
        "failed_calls": report["n_failed"],
        **{f"latency_s_{name}": value for name, value in marks.items()},
        "stop_reason": report["stop_reason"],
        "cost_by_teacher": bars(by_teacher),
        "tokens": markdown_table([report["tokens"]]),
        "errors": bars(report["errors"]),
        "only_looked": bars(report.get("only_looked") or {}),
        "looks_answered_by": bars(report.get("looks_answered_by") or {}),
        "not_asked": bars(report["skipped"]),
    }


def _prompts_sent(project: "Project", batch: str, state: TraceState) -> Mapping[str, Any]:
    """Build the request of each teacher again; an equal hash says that it is what was sent."""
    settings = project.settings
    terms = frozenset(settings.replay.accepted_terms)
    builder = RequestBuilder(RequestOptions(accepted_terms=terms))
    shown = {"harness": state["harness"]} if "harness" in state else {}
    # The server that plays teachers speaks the language of OpenRouter.
    spoken = {"dialect": "openrouter"} if settings.played else {}
    teachers = [each.model_copy(update=spoken) for each in settings.teachers()]
    prompts = {
        f"prompt for {teacher.name}": {
            "request_sha": builder.question(state, teacher).sha,
            "body": json.loads(builder.body(state, teacher, None)),
        }
        for teacher in teachers
    }
    return {**shown, **_steps_of(project, batch, state["state_id"]), **prompts}


def _steps_of(project: "Project", batch: str, state_id: str) -> dict[str, Any]:
    """Return step by step what teachers looked at before they acted, and what each look was answered."""
    if not project.root.has("teacher_actions", batch):
        return {}
    answers = teacher_actions_from_table(project.root.read("teacher_actions", batch))
    return {
        f"{answer.teacher} looked first": [
            {
                "calls": canonical_action(look.action, cwd=None).render(),
                "answers": [{"source": each.source, "text": each.text} for each in look.answers],
                "request_sha": look.request_sha,
                "cost_usd": look.cost_usd,
                "n_prompt_tokens": look.n_prompt_tokens,
                "n_cached_tokens": look.n_cached_tokens,
                "n_completion_tokens": look.n_completion_tokens,
            }
            for look in answer.looks
        ]
        for answer in answers
        if answer.looks and answer.state_id == state_id
    }


REPLAY = Stage(
    name="replay",
    about="What each teacher would have done at each state, bought under a hard ceiling.\n\n"
    "Every paid answer is in the ledger before it counts: stopping or killing this step loses none, "
    "and running it again asks only what was not answered.",
    version=4,
    work=ask_teachers,
    reads=("turns", "states"),
    writes=("teacher_actions",),
    settings=_decisive,
    inputs=lambda project, batch: project.tools_digest(batch),
    is_done=lambda _, receipt: receipt.report["is_complete"],
    pays=True,
    told="n_answers",
    figures=_figures,
    facts=answer_facts,
    trace=_prompts_sent,
    checks=(
        Check(name="answers_match_states", look=tables.answers_of_states, is_blocking=True),
        Check(name="calls_are_answered", look=tables.calls_answered, is_blocking=True),
        Check(name="budget_is_kept", look=tables.budget_kept),
    ),
    asset="teacher_actions",
)
