"""The stage that makes pairs from the teachers' answers."""

import logging
from collections.abc import Mapping, Sequence
from difflib import unified_diff
from typing import TYPE_CHECKING, Any

from replay_pipeline.actions import agreement_level, canonical_action
from replay_pipeline.judge.extract import extract_pairs
from replay_pipeline.judge.records import (
    continuation_rows,
    outcomes_table,
    pairs_table,
    positives_table,
)
from replay_pipeline.judge.strengths import strengths
from replay_pipeline.replay.ask.rows import continuations_from_table, teacher_actions_from_table
from replay_pipeline.settings import Settings
from replay_pipeline.stages.audit import tables
from replay_pipeline.stages.receipts import Receipt, added, total
from replay_pipeline.stages.shown import shown_below
from replay_pipeline.stages.stage import Check, Report, Stage, Task
from replay_pipeline.stages.work.markdown import (
    Markdown,
    bars,
    code_block,
    literal_markdown,
    markdown_table,
)
from replay_pipeline.storage.pair_rows import pairs_of
from replay_pipeline.types import DPOPair, TraceState

if TYPE_CHECKING:
    from replay_pipeline.stages.project import Project

logger = logging.getLogger(__name__)

_N_SAMPLES = 3


def make_pairs(task: Task) -> Report:
    """Make `dpo_pairs`, `positives`, and `outcomes` from the answers at a batch's states."""
    from replay_pipeline.stages.work.trials import try_batch, verdicts_of

    project, options = task.project, task.project.settings.pairs
    marks, chances = checked_pairs(project.settings)
    table = task.read("teacher_actions")
    answers = teacher_actions_from_table(table)
    trials, counts = try_batch(project, task.batch, answers)
    report = extract_pairs(
        project.states([task.batch]),
        answers,
        options.agreement_threshold,
        trials=trials,
        verdicts=verdicts_of(trials, project.states([task.batch]), answers),
        level=options.level,
        include_natural=options.include_natural,
        count_own_family=options.count_own_family,
        min_p_better=options.min_p_better,
        checked={pair_id: mark == "accept" for pair_id, mark in marks.items()},
        chances=chances,
    )
    task.write("dpo_pairs", pairs_table(report.pairs))
    went_on = continuation_rows(project.states([task.batch]), continuations_from_table(table))
    task.write("positives", positives_table([*report.positives, *went_on]))
    task.write("outcomes", outcomes_table(report.outcomes))
    seen = {pair.get("pair_id", "") for pair in (*report.pairs, *report.refuted)}
    return {
        **report.to_json(),
        **({"tried": counts} if counts else {}),
        # A pair that was refuted is in no table: what was said of it would be lost with the next file.
        "marks": {key: [mark, chances.get(key, 1.0)] for key, mark in marks.items() if key in seen},
        "n_rejected_in_review": len(report.refuted),
        "n_consensus": sum(report.consensus_levels.values()),
        "n_agreement": report.outcome_counts.get("agreement", 0),
    }


def _tried_by(settings: Settings) -> Mapping[str, Any]:
    """Return the settings that decide which actions are tried, and how."""
    options = settings.workspaces
    if options.execute == "off":
        return {"execute": None}
    # What limits commands decides nothing where none is run.
    only = None if options.execute == "commands" else {"execute", "repositories"}
    return options.model_dump(mode="json", include=only)


def checked_pairs(settings: Settings) -> tuple[Mapping[str, Any], Mapping[str, float]]:
    """Return what a person marked, and the chances with which those pairs were drawn.

    Raises:
        ConfigError: the file of marks is no export of a review page.
        StorageError: it can't be read.
    """
    from replay_pipeline.stages.pages.pairs import read_chances, read_marks

    path = settings.pairs.marks
    return (read_marks(path), read_chances(path)) if path else ({}, {})


def _decisive(settings: Settings) -> Mapping[str, Any]:
    checked = [sorted(each.items()) for each in checked_pairs(settings)]
    return {
        "pairs": settings.pairs.model_dump(mode="json", exclude={"marks"}),
        **shown_below(settings),
        "pairs.marks": repr(checked) if any(checked) else None,
        "workspaces": _tried_by(settings),
    }


def _figures(receipts: Sequence[Receipt]) -> Mapping[str, Any]:
    return {
        "agreements": total(receipts, "n_consensus"),
        "agreements_with_student": total(receipts, "n_agreement"),
        "pairs": total(receipts, "n_pairs"),
        "lessons": total(receipts, "n_lessons"),
        "unconfirmed": total(receipts, "n_answers"),
        "outcomes": added(r.report.get("outcomes", {}) for r in receipts),
    }


def _facts(project: "Project", receipt: Receipt) -> Mapping[str, Any]:
    report = receipt.report
    n_states = sum(report["outcomes"].values())
    usd = sum(tally["cost_usd"] for tally in report["teachers"].values())
    n_judged = report["n_consensus"] + report["outcomes"].get("no_consensus", 0)
    first = project.root.read("dpo_pairs", receipt.batch).slice(0, _N_SAMPLES)
    pairs = pairs_of(first, project.prompts(receipt.batch))
    return {
        "dagster/partition_row_count": report["n_pairs"],
        "pair_yield": report["n_pairs"] / max(1, n_states),
        "usd_per_pair": usd / max(1, report["n_pairs"]),
        "consensus_rate": report["n_consensus"] / max(1, n_judged),
        "agreements_with_student": report["n_agreement"],
        "rejected_in_review": report["n_rejected_in_review"],
        "outcomes": bars(report["outcomes"]),
        "sources": bars(report["pairs_by_source"]),
        "teachers": markdown_table([each.row() for each in strengths([report])]),
        "agreement": _matrix(report["matrix"]),
        **{f"sample {n}": _sample(pair) for n, pair in enumerate(pairs, 1)},
    }


def _matrix(matrix: dict[str, dict[str, dict[str, float]]]) -> Markdown:
    """Draw how often each two teachers agree."""
    names = sorted(matrix)
    return markdown_table(
        [
            {"teacher": name}
            | {
                other: f"{matrix[name][other]['rate']:.0%} of {matrix[name][other]['n']}"
                if other in matrix[name]
                else "—"
                for other in names
            }
            for name in names
        ]
    )


def _sample(pair: DPOPair) -> Markdown:
    """Draw what was asked, and how what the student did differs from what the teachers would do."""
    from replay_pipeline.stages.pages.sides import last_request, native_sides, over_lines

    rejected, chosen = native_sides(pair)
    left = over_lines(rejected, pair["rejected"]).split("\n")
    right = over_lines(chosen, pair["chosen"]).split("\n")
    diff = unified_diff(left, right, "rejected", "chosen", n=99, lineterm="")
    by = ", ".join(pair.get("teachers_agreeing") or ()) or pair.get("source", "")
    return Markdown(
        f"**{literal_markdown(pair['state_id'])}** · {literal_markdown(by)} · {literal_markdown(pair.get('agreement_level') or '—')}"
        f"\n\n> {literal_markdown(last_request(pair.get('state_messages', [])))}"
        f"\n\n{code_block(chr(10).join(diff), 'diff')}"
    )


def _votes(project: "Project", batch: str, state: TraceState) -> Mapping[str, Any]:
    """Show every action in the form in which votes are counted, and how near it is to the agent's."""
    own = canonical_action(state["student_action"], cwd=state.get("cwd"))
    votes: dict[str, Any] = {"the agent itself": {"action": own.render()}}
    for row in teacher_actions_from_table(project.root.read("teacher_actions", batch)):
        if row.state_id == state["state_id"]:
            action = canonical_action(row.action or {}, cwd=state.get("cwd"))
            level = agreement_level(own, action) if row.action else None
            votes[row.teacher] = {"action": action.render(), "agrees with the agent at": level}
    return {"votes": votes}


PAIRS = Stage(
    name="pairs",
    about="States at which enough teachers agreed on something that the agent did not do.",
    version=15,
    work=make_pairs,
    reads=("turns", "states", "teacher_actions"),
    writes=("dpo_pairs", "positives", "outcomes"),
    settings=_decisive,
    inputs=lambda project, batch: project.tools_digest(batch),
    told="n_pairs",
    figures=_figures,
    facts=_facts,
    trace=_votes,
    checks=(Check(name="sides_differ", look=tables.sides_differ, is_blocking=True),),
    asset="dpo_pairs",
)
