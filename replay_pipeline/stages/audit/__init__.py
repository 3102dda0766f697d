"""What must hold of the data at rest, looked at from outside the stages that wrote it.

Each function returns a `Verdict`: whether it holds, the figures, and what to do if it does not.
"""

from replay_pipeline.stages.audit.dataset import (
    prompts_decide,
    published_secrets,
    shards_against_manifests,
    shared_prompts,
    shared_sessions,
)
from replay_pipeline.stages.audit.drift import agreement_drift, drop_drift
from replay_pipeline.stages.audit.tables import (
    answers_of_states,
    budget_kept,
    faithful_prefixes,
    kept_or_dropped,
    matching_schemas,
    refuse_unfit,
    rows_accounted,
    sides_differ,
    whole_states,
)
from replay_pipeline.stages.audit.verdict import Verdict

__all__ = [
    "Verdict",
    "agreement_drift",
    "answers_of_states",
    "budget_kept",
    "drop_drift",
    "faithful_prefixes",
    "kept_or_dropped",
    "matching_schemas",
    "prompts_decide",
    "published_secrets",
    "refuse_unfit",
    "rows_accounted",
    "shards_against_manifests",
    "shared_prompts",
    "shared_sessions",
    "sides_differ",
    "whole_states",
]
