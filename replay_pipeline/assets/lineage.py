"""The sources of each column, for Dagster's column lineage."""

from collections.abc import Mapping

import dagster as dg

from replay_pipeline.publish import layout
from replay_pipeline.storage.schemas import NORMALIZED_PAIRS

_ACTION = ("action_text", "action_tool_calls_json")
_STATE = {"trace_states": ("state_id",)}

_PAIR_SOURCES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "state_id": _STATE,
    "session_id": {"trace_states": ("session_id",)},
    "chosen": {"teacher_actions": _ACTION},
    "chosen_action_json": {"teacher_actions": _ACTION},
    "rejected": {"trace_states": _ACTION},
    "rejected_action_json": {"trace_states": _ACTION},
    "teachers_agreeing": {"teacher_actions": ("teacher",)},
    "hint": {"trace_states": ("hint",)},
    "outcome": {"trace_states": ("outcome",)},
    "cost_usd": {"teacher_actions": ("cost_usd",)},
}
"""The columns that people ask about: each batch's record in Dagster carries them."""

_MADE_IN_NORMALIZATION = {
    "chosen_messages_json": "chosen_action_json",
    "rejected_messages_json": "rejected_action_json",
}
_MADE_IN_PUBLICATION = {
    "chosen": "chosen_messages_json",
    "rejected": "rejected_messages_json",
}

SOURCES: Mapping[str, Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "teacher_actions": {"state_id": _STATE},
    "dpo_pairs": _PAIR_SOURCES,
    "samples": {"state_id": {"dpo_pairs": ("state_id",)}},
    "normalized_pairs": {
        name: {"dpo_pairs": (_MADE_IN_NORMALIZATION.get(name, name),)}
        for name in (*_PAIR_SOURCES, *_MADE_IN_NORMALIZATION)
    },
    "published_dataset": {
        name: {"normalized_pairs": (_MADE_IN_PUBLICATION.get(name, name),)}
        for name in layout.PAIRS.names
        if _MADE_IN_PUBLICATION.get(name, name) in NORMALIZED_PAIRS.names
    }
    # A pair names its state; its prompt is put in when it is published.
    | {name: {"normalized_pairs": ("state_id",)} for name in ("prompt", "tools")},
}
"""Asset, column → upstream asset, columns."""


def column_lineage(asset: str) -> dict[str, dg.TableColumnLineage]:
    """Return metadata that says where the columns of an asset come from, if known.

    Dagster looks for it on the latest materialization.
    """
    columns = {
        column: [
            dg.TableColumnDep(dg.AssetKey(upstream), name)
            for upstream, names in sources.items()
            for name in names
        ]
        for column, sources in SOURCES.get(asset, {}).items()
    }
    return {"dagster/column_lineage": dg.TableColumnLineage(columns)} if columns else {}
