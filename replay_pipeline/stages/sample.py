"""The stage that samples the trainee at states where the teachers agree."""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from replay_pipeline.settings import Settings
from replay_pipeline.stages.pairs import decisive, tried_by
from replay_pipeline.stages.receipts import Overview, Receipt
from replay_pipeline.stages.replay import accounts, answer_facts, asked
from replay_pipeline.stages.stage import Report, Stage, Task
from replay_pipeline.stages.work.markdown import bars
from replay_pipeline.stages.work.trainee import serving, trainee_of
from replay_pipeline.types import DPOPair, TraceState

if TYPE_CHECKING:
    from replay_pipeline.stages.project import Project


logger = logging.getLogger(__name__)


def sample_trainee(task: Task) -> Report:
    """Sample the trainee at states where the teachers agree, and make pairs of the samples.

    If the trainee differs from the teachers, its action becomes the worse side of a pair in
    `sampled_pairs`. If it agrees, it becomes a row of `sampled_positives`. The ledger keeps samples
    like paid answers, so a stopped stage continues. Changed weights are sampled again.

    Raises:
        ConfigError: no trainee is named, or it can't be asked.
        TrainError: the model in the folder can't be served.
    """
    from replay_pipeline.judge.on_policy import on_policy_pairs
    from replay_pipeline.judge.records import pairs_table, positives_table
    from replay_pipeline.replay import refuse_if_nobody_answers, replay_facts, replay_in_thread
    from replay_pipeline.replay.ask.rows import teacher_actions_from_table, teacher_actions_table
    from replay_pipeline.stages.work.trials import try_batch

    project, batch = task.project, task.batch
    trainee, options = project.settings.trainee, project.settings.pairs
    states = states_with_consensus(project, batch)
    with serving(trainee) as specs:
        replay = replay_in_thread(
            states,
            specs,
            max_total_usd=trainee.max_total_usd,
            counts_recorded=False,
            partition=batch,
            tick=project.tell_part(batch, stage="sample"),
            ledger=project.settings.ledger_url(),
            **accounts(project),
        )
    refuse_if_nobody_answers(replay)
    answers = list(teacher_actions_from_table(task.read("teacher_actions")))
    tried = try_batch(project, batch, [*answers, *replay.actions])
    report = on_policy_pairs(
        states,
        answers,
        replay.actions,
        options.agreement_threshold,
        known_pairs=set(task.read("dpo_pairs")["pair_id"].to_pylist()),
        known_positives=set(task.read("positives")["state_id"].to_pylist()),
        trials=tried.trials,
        level=options.level,
        min_p_better=options.min_p_better,
        count_own_family=options.count_own_family,
    )
    task.write("samples", teacher_actions_table(replay.actions, "samples"))
    task.write("sampled_pairs", pairs_table(report.pairs, "sampled_pairs"))
    task.write("sampled_positives", positives_table(report.positives, "sampled_positives"))
    if report.advice is not None:
        logger.warning("%s", report.advice)
    told = {"tried": tried.counts} if tried.counts else {}
    return {**replay_facts(replay), **report.to_json(), **told, "blind": _blind(report.pairs)}


def _blind(pairs: Sequence[DPOPair]) -> dict[str, Any] | None:
    """Measure how often the better side of sampled pairs can be told without the prompt."""
    from replay_pipeline.publish.blind import blind_control

    found = blind_control(
        [json.dumps(pair["chosen_action"]) for pair in pairs],
        [json.dumps(pair["rejected_action"]) for pair in pairs],
        [str(pair.get("session_id")) for pair in pairs],
    )
    return None if found is None else found.to_json()


def states_with_consensus(project: "Project", batch: str) -> list[TraceState]:
    """Return the states of a batch at which enough teachers agree."""
    from replay_pipeline.judge.on_policy import WITH_CONSENSUS

    outcomes = project.root.read("outcomes", batch).to_pylist()
    wanted = {row["state_id"] for row in outcomes if row["outcome"] in WITH_CONSENSUS}
    return [state for state in project.states([batch]) if state["state_id"] in wanted]


def _decisive(settings: Settings) -> Mapping[str, Any]:
    trainee = settings.trainee
    (model,) = asked([trainee_of(trainee)]).values()
    options = {"n_samples", "temperature", "max_prompt_tokens", "max_completion_tokens"}
    return {
        "trainee": trainee.model_dump(include=options),
        # A folder counts by the bytes of its model.
        "trainee.folder": None if trainee.endpoint else model["model"],
        "trainee.endpoint": model if trainee.endpoint else {"model": None},
        **decisive(settings),
        "workspaces": tried_by(settings),
    }


def _facts(project: Overview, receipt: Receipt) -> Mapping[str, Any]:
    from replay_pipeline.publish.blind import in_words

    report = receipt.report
    return {
        **answer_facts(project, receipt),
        "agreement_rate": report["agreement_rate"],
        "sampled_pairs": report["n_pairs"],
        "sampled_positives": report["n_positives"],
        "repeated": report["n_repeated"],
        "outcomes": bars(report["outcomes"]),
        "prompt_blind": in_words(report.get("blind")),
        "advice": report.get("advice") or "none",
        "forms_of_chosen": bars(report.get("forms", {}).get("chosen", {})),
        "forms_of_rejected": bars(report.get("forms", {}).get("rejected", {})),
    }


SAMPLE = Stage(
    name="sample",
    about="What the model to be trained does where the teachers agree, and the pairs that this "
    "makes.\n\nRun by hand, or by the job `sample_trainee`: it needs a trainee in the settings.",
    version=3,
    work=sample_trainee,
    reads=("turns", "states", "teacher_actions", "dpo_pairs", "positives", "outcomes"),
    writes=("samples", "sampled_pairs", "sampled_positives"),
    settings=_decisive,
    inputs=lambda project, batch: project.tools_digest(batch),
    is_done=lambda _, receipt: receipt.report["is_complete"],
    is_wanted=lambda settings: settings.trainee.is_set,
    pays=True,
    facts=_facts,
    asset="samples",
)
