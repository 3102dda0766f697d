"""Spending beyond one batch: a common ceiling and its shares, estimates, and plans for a night."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from replay_pipeline.errors import ConfigError, PriceError
from replay_pipeline.judge.precision import FEWEST_CHECKED
from replay_pipeline.judge.strengths import strengths
from replay_pipeline.replay import (
    Estimate,
    check_teachers,
    control,
    counted_usd,
    estimate,
)
from replay_pipeline.replay.ask.looks import ANY_SHARE
from replay_pipeline.replay.buy.estimates import advice
from replay_pipeline.replay.buy.places import far_apart
from replay_pipeline.settings import teacher_key
from replay_pipeline.stages import chain
from replay_pipeline.stages.engine import do, is_due
from replay_pipeline.stages.pages.costs import list_price_usd
from replay_pipeline.stages.pages.public_scores import words_of_scores
from replay_pipeline.stages.project import Project
from replay_pipeline.stages.receipts import Receipt
from replay_pipeline.stages.replay import (
    accounts,
    asking_options,
    price_folder,
    who_answers_looks,
)
from replay_pipeline.stages.staleness import read_again, reasons_by_batch
from replay_pipeline.types import Progress

_MUCH_CHEAPER = 0.5
"""Below this share of what the agent costs, a teacher is said to be much cheaper."""
_PLANNED_ABOVE_BUDGET = 1.25
"""Estimates are rough: plan for a little more than there is, so that no money is left over."""
_LEAST_STATES = 5
"""A batch has a share only if that is likely to ask everybody at so many of its states: less would
hardly hold the bound of a call, and be left over."""
_N_PROJECTS = 20
"""So many projects have their share before money finishes what was begun."""


def completed_batches(project: Project) -> set[str]:
    """Return the batches in which every question has its answer. The others continue in the next run.

    Batches that later lost states to another batch don't count. They are redone for free.
    """
    reports = project.receipts.reports("replay", names=("is_complete",))
    is_complete = {batch for batch, report in reports.items() if report["is_complete"]}
    return is_complete - read_again(project, chain.by_batch())


def stale_work(project: Project) -> dict[str, Any]:
    """Return the reasons why results are stale, by batch and stage.

    A later stage is redone only if its input rows change. `cost` is the estimated cost of questions
    that weren't asked in this form yet, or None if no question changes. `no_price` says why it
    can't be told.
    """
    batches = reasons_by_batch(project, chain.STAGES)
    asked_otherwise = [batch for batch, found in batches.items() if "replay" in found]
    found: dict[str, Any] = {"batches": batches, "cost": None, "no_price": None}
    if asked_otherwise:
        try:
            found["cost"] = estimate_replay(project, asked_otherwise).to_json()
        except (ConfigError, PriceError) as error:
            found["no_price"] = str(error)
    return found


def check_keys(project: Project) -> None:
    """Check that every teacher has its key, before any request is sent.

    Raises:
        ConfigError: a key is missing.
    """
    if project.settings.played is None:
        for teacher in project.settings.replay.teachers:
            teacher_key(teacher)


def checked_teachers(project: Project) -> list[dict[str, Any]]:
    """Return each teacher with its key, endpoint, price, terms, and problem."""
    with project.teachers() as teachers:
        checks = check_teachers(teachers, price_folder=price_folder(project))
    return [asdict(check) for check in checks]


def estimate_replay(project: Project, batches: Sequence[str] | None = None) -> Estimate:
    """Return what is left to ask in `batches` (by default all), and what the ceiling pays for."""
    batches = batches or project.batches()
    with project.teachers() as teachers, who_answers_looks(project, batches) as looks:
        found = estimate(
            project.asked_states(batches),
            teachers,
            max_total_usd=project.settings.replay.max_total_usd,
            ledger=project.settings.ledger_url(),
            looks=looks,
            **asking_options(project),
        )
    found = as_checked(found, _checked(project))
    if found.words or project.settings.played:
        return found
    agents: Counter[str] = Counter()
    for batch in batches:
        column = project.root.read("states", batch, columns=["student_model"])["student_model"]
        agents.update(model for model in column.to_pylist() if model)
    return replace(found, words=tuple(words_beforehand(found, agents)))


def _checked(project: Project) -> Iterator[Mapping[str, Any]]:
    """Yield the report of each batch with pairs that a person checked."""
    for batch, report in project.receipts.reports("pairs", names=["precision"]).items():
        n_checked = (report.get("precision") or {}).get("n_checked", 0)
        if n_checked >= FEWEST_CHECKED and (receipt := project.receipts.read("pairs", batch)):
            yield receipt.report


def as_checked(seen: Estimate, reports: Iterable[Mapping[str, Any]]) -> Estimate:
    """Correct what votes promise by the pairs that a person checked.

    Votes alone can't tell an agreement that is right from a mistake that the teachers share.
    """
    checked = list(reports)
    found = strengths(checked)
    if not found:
        return seen
    n = sum(each["precision"]["n_checked"] for each in checked)
    low, high = (
        sum(each["precision"]["n_checked"] * each["precision"][end] for each in checked) / n
        for end in ("low", "high")
    )
    best = max(found, key=lambda each: each.right)
    words = (
        f"by {n} checked pairs, {low:.0%} to {high:.0%} of the pairs are right, your best teacher in "
        f"{best.right:.0%}, and that model in {best.agent_right:.0%}"
    )
    told = (words, advice(best.right - best.agent_right))
    return replace(seen, pairs_right=(low, high), words=told)


def words_beforehand(found: Estimate, agents: Mapping[str, int]) -> list[str]:
    """Describe, before there are answers, whether these teachers are likely to teach this agent.

    At this point only public scores and list prices are known. Cheap models are often weaker, and
    if the agent is better, the teachers' agreement teaches little. Only answers show at which kinds
    of decision a teacher is stronger.
    """
    if not agents or not found.teachers:
        return []
    model = max(agents, key=lambda name: (agents[name], name))
    scores = words_of_scores(model, {each.teacher: each.model for each in found.teachers})
    ask = "ask at 120 states first, and this command says where they are stronger and where weaker"
    dearest = max(found.teachers, key=lambda each: each.expected_usd / max(1, each.n_calls))
    tokens = {
        "input": dearest.n_prompt_tokens - dearest.n_cached_tokens,
        "cache_read": dearest.n_cached_tokens,
        "output": dearest.n_completion_tokens,
    }
    usd = list_price_usd(model, tokens)
    if not usd or not dearest.expected_usd:
        return [*scores, ask]
    compared = (
        f"{dearest.teacher}, your dearest teacher, costs ${dearest.expected_usd:.2f}; the same calls of "
        f"{model}, which wrote {agents[model]:,} of {sum(agents.values()):,} states, would cost ${usd:.2f}"
    )
    if dearest.expected_usd >= _MUCH_CHEAPER * usd:
        return [*scores, compared, ask]
    cheap = (
        "teachers that cost so much less are often weaker than the model that wrote the sessions"
    )
    return [*scores, compared, f"{cheap}: {ask}"]


def replay_within(
    project: Project,
    max_total_usd: float | None = None,
    *,
    night: str | None = None,
    batches: Sequence[str] = (),
) -> Callable[[str], Receipt]:
    """Return `replay` with one ceiling that all batches share.

    Calls with an unknown outcome count as paid. By default, the ceiling comes from the settings:
    the one for a `night`, which all its runs share, or the one for a run. If the money isn't enough
    for all `batches`, each gets a share by its number of states, and its unspent money goes to
    later ones.
    """
    left_usd = project.settings.replay.max_total_usd if max_total_usd is None else max_total_usd
    if night:
        of_night_usd = left_of_night(project, night)
        left_usd = of_night_usd if max_total_usd is None else min(max_total_usd, of_night_usd)
    open_batches = set(project.root.batches("states")) - completed_batches(project)
    # What older code or other settings asked is gone through again, though it costs nothing.
    due = [key for key in batches if is_due(chain.stage_named("replay"), project, key)]
    planned = due if batches else open_batches
    n_states = sum(why is None for key in planned for why in project.not_asked(key))
    n_questions = n_states * len(project.settings.teachers())
    project.on_progress(Progress(stage="replay", n_done=0, n_total=n_questions, limit_usd=left_usd))

    asked = [key for key in batches if key in open_batches]
    expected = _expected(project, asked) if len(asked) > 1 and left_usd else None
    waiting = shares_by_batch(project, asked, left_usd, expected)

    def replay(batch: str) -> Receipt:
        nonlocal left_usd
        n_waiting = sum(waiting.values())
        share = waiting.pop(batch, 0) / n_waiting if n_waiting else 1.0
        receipt = do(
            chain.stage_named("replay").told_to(max_total_usd=left_usd * share, night=night),
            project,
            batch,
        )
        if not receipt.is_reused:
            paid_usd = receipt.report["newly_spent_usd"] + receipt.report["unknown_usd"]
            left_usd = max(left_usd - paid_usd, 0.0)
        return receipt

    return replay


def _expected(project: Project, batches: Sequence[str]) -> Estimate | None:
    """Return what batches should cost; `None` where there is no telling: the replay says why."""
    try:
        return estimate_replay(project, batches)
    except (ConfigError, PriceError):
        return None


def control_run(project: Project, *, max_total_usd: float, n_states: int = 50) -> Receipt:
    """Ask the students' own models again, and report how often they take another action.

    A sample of states is enough. The figure goes into the dataset card.

    Raises:
        ConfigError: the teachers are recorded or made up, so there are no answers of the students'
            models.
    """
    if project.settings.played:
        raise ConfigError(
            f"the {project.settings.played} has no answers of the agents' own models: a control run needs real endpoints (REPLAY_TEACHERS=openrouter)"
        )
    started = time.perf_counter()
    batches = project.batches()
    with who_answers_looks(project, batches) as looks:
        report = control(
            project.asked_states(batches),
            max_total_usd=max_total_usd,
            n_states=n_states,
            level=project.settings.pairs.level,
            teacher=project.settings.replay.student,
            tick=project.on_progress,
            ledger=project.settings.ledger_url(),
            looks=looks,
            max_looks=project.settings.replay.max_looks,
            looks_share=ANY_SHARE,
            **accounts(project),
        )
    return project.receipts.note("control", "all", report.to_json(), started=started)


def covering(project: Project, batches: Sequence[str]) -> tuple[list[str], int]:
    """Order batches so that any first part of the list covers projects and time.

    Returns:
        The order, and how many batches at its beginning each add a new project.
    """
    folders = {
        each.key: {_project_folder(slice_.path) for slice_ in each.slices}
        for each in project.manifests()
    }
    first: list[str] = []
    rest: list[str] = []
    covered: set[str] = set()
    for key in far_apart(batches):
        new = folders.get(key, set()) - covered
        (first if new else rest).append(key)
        covered |= new
    return first + rest, len(first)


def _project_folder(path: Path) -> str:
    """Name the folder below `projects`, or else the one that a session lies in."""
    parts = path.parts
    if "projects" in parts[:-2]:
        return parts[len(parts) - parts[::-1].index("projects")]
    return str(path.parent)


def fitting(project: Project, batches: Sequence[str], *, max_total_usd: float) -> list[str]:
    """Return the batches to spend `max_total_usd` on, judged by the cost of earlier ones.

    They lie far apart, and come from as many projects as the money allows. The cost of a batch is
    assumed to grow with the bytes of its sessions. At least one batch is returned, and all batches
    if none was paid for yet. This is only a plan: the replay enforces the ceiling.
    """
    sizes = {batch.key: batch.n_bytes for batch in project.manifests()}
    reports = project.receipts.reports("replay")
    done = [key for key, report in reports.items() if report["is_complete"] and key in sizes]
    spent_usd = sum(reports[key]["spent_usd"] for key in done)
    n_bytes = sum(sizes[key] for key in done)
    if not (spent_usd and n_bytes):
        return list(batches)
    left_usd = max_total_usd * _PLANNED_ABOVE_BUDGET
    usd_per_state = spent_usd / max(1, sum(reports[key].get("n_states", 0) for key in done))
    order, n_first = covering(project, batches)
    chosen: set[str] = set()
    for place, key in enumerate(order[: _n_with_a_share(left_usd, usd_per_state)]):
        if chosen and left_usd <= 0 and place >= min(n_first, _N_PROJECTS):
            break
        paid_usd = reports.get(key, {}).get("spent_usd", 0.0)
        left_usd -= max(0.0, spent_usd / n_bytes * sizes.get(key, 0) - paid_usd)
        chosen.add(key)
    return [key for key in batches if key in chosen]


def shares_by_batch(
    project: Project, batches: Sequence[str], left_usd: float, found: Estimate | None
) -> dict[str, int]:
    """Return the number of states of each batch that gets a share of scarce money. Empty if there is enough."""
    if len(batches) < 2 or found is None or found.expected_usd <= left_usd:
        return {}
    order, _ = covering(project, batches)
    n_most = _n_with_a_share(left_usd, found.expected_usd / max(1, found.n_states))
    return {batch: project.root.n_rows("states", batch) for batch in order[:n_most]}


def _n_with_a_share(usd: float, usd_per_state: float) -> int:
    return max(1, int(usd / max(_LEAST_STATES * usd_per_state, 1e-12)))


def left_of_night(project: Project, night: str) -> float:
    """Return how much of a night's money is left, in US dollars."""
    spent_usd = counted_usd(project.settings.ledger_url(), f"night:{night}")
    return max(0.0, project.settings.replay.max_nightly_usd - spent_usd)
