"""The asset of verdicts, one partition a model, and the schedule that asks again each month."""

import dagster as dg
from pydantic import Field

from replay_pipeline.assets.reporting import GROUP, OWNERS, metadata_value
from replay_pipeline.assets.resources import PipelineResource
from replay_pipeline.stages.budget.verdict import verdict_run
from replay_pipeline.stages.views.webhook import notify

judged_model = dg.DynamicPartitionsDefinition(name="judged_model")
_FACTS = (
    "answer",
    "n",
    "difference",
    "low",
    "high",
    "usd_per_100",
    "agent_usd_per_100",
    "spent_usd",
)


class VerdictConfig(dg.Config):
    """The decisions and the money of a verdict."""

    cohort: str = Field(
        default="default", description="Name of the decisions; each model meets the same."
    )
    max_total_usd: float = Field(default=2.0, description="Ceiling of this verdict, in US dollars.")


@dg.asset(
    partitions_def=judged_model,
    group_name=GROUP,
    owners=OWNERS,
    kinds={"python", "json"},
    tags={"stage": "verdict", "costs": "money"},
    pool="teachers",
    description="Whether a model could have done the work of the one that wrote the sessions. Add a partition with "
    "the model's name or id, or name it in `replay.judged_models`.",
)
def verdicts(
    context: dg.AssetExecutionContext, config: VerdictConfig, pipeline: PipelineResource
) -> dg.MaterializeResult:
    """Judge the model of the partition, and tell the webhook."""
    work = pipeline.open()
    report = verdict_run(
        work, context.partition_key, max_total_usd=config.max_total_usd, cohort=config.cohort
    ).report
    facts = {name: report[name] for name in _FACTS}
    notify(work.settings.notify, "verdict", report["words"], {"model": report["model"], **facts})
    found = {"words": report["words"], "cohort": report["cohort"], **facts}
    return dg.MaterializeResult(metadata={k: metadata_value(v) for k, v in found.items()})


verdict_job = dg.define_asset_job(
    "judge_models",
    selection=dg.AssetSelection.assets(verdicts),
    description="Give a verdict on a model.",
)


@dg.schedule(
    job=verdict_job,
    cron_schedule="0 6 1 * *",
    description="Gives a verdict on each model of `replay.judged_models` at the beginning of the month.",
)
def monthly_verdicts(
    context: dg.ScheduleEvaluationContext, pipeline: PipelineResource
) -> list[dg.RunRequest] | dg.SkipReason:
    """Return a run for each model of the settings."""
    models = list(pipeline.settings().replay.judged_models)
    context.instance.add_dynamic_partitions(judged_model.name or "", models)
    key = context.scheduled_execution_time.isoformat()
    runs = [dg.RunRequest(run_key=f"{key}:{each}", partition_key=each) for each in models]
    return runs or dg.SkipReason("replay.judged_models names no model")
