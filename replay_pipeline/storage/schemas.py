"""Arrow schemas of the tables at rest: the contract with everything outside this package.

Messages, tool lists and statistics are kept as JSON text: their shape differs from row to row,
and a struct column would merge the shapes. Each table is written by `replay_pipeline.storage.tables`,
which stamps `schema_version` into the file and checks it on reading.
"""

import pyarrow as pa

SCHEMA_VERSION = "3"
"""Raised when a column changes its meaning or goes; a new nullable column does not raise it."""

_TIMESTAMP = pa.timestamp("ms", tz="UTC")
_STRINGS = pa.list_(pa.string())

SESSIONS = pa.schema(
    [
        ("session_id", pa.string()),
        ("agent", pa.string()),
        ("agent_id", pa.string()),  # subagent, null for a main session
        ("parent_session_id", pa.string()),
        ("project", pa.string()),  # hash of the folder unless opted out
        ("versions", _STRINGS),
        ("models", _STRINGS),
        ("first_timestamp", _TIMESTAMP),
        ("last_timestamp", _TIMESTAMP),
        ("n_turns", pa.int32()),
        ("n_states", pa.int32()),
        ("source_path_sha", pa.string()),
        ("source_size_bytes", pa.int64()),
        ("source_offset_bytes", pa.int64()),
        ("source_tail_sha", pa.string()),
        ("n_rows", pa.int64()),
        ("n_rows_used", pa.int64()),
        ("skipped_json", pa.string()),  # {reason: rows}
    ]
)

TURNS = pa.schema(
    [
        ("session_id", pa.string()),
        ("turn_idx", pa.int32()),
        ("parent_turn_idx", pa.int32()),  # null for a root
        ("segment", pa.int32()),  # raised by each compaction
        ("kind", pa.string()),
        ("timestamp", _TIMESTAMP),
        ("model", pa.string()),
        ("cwd", pa.string()),
        ("messages_json", pa.string()),  # apart from an action that `states` holds
        ("thinking", pa.string()),
        ("n_input_tokens", pa.int64()),
        ("n_cache_creation_tokens", pa.int64()),
        ("n_cache_read_tokens", pa.int64()),
        ("n_output_tokens", pa.int64()),
        ("flags", _STRINGS),
    ]
)

STATES = pa.schema(
    [
        ("state_id", pa.string()),
        ("session_id", pa.string()),
        ("turn_idx", pa.int32()),
        ("depth", pa.int32()),  # turns on the path before it
        ("segment", pa.int32()),
        ("student_model", pa.string()),
        ("cwd", pa.string()),
        ("action_text", pa.string()),
        ("action_tool_calls_json", pa.string()),
        ("outcome", pa.string()),
        ("error_kind", pa.string()),
        ("hint", pa.string()),
        ("recovered_by", pa.string()),  # state_id
        ("siblings", _STRINGS),  # state_ids with the very same prefix
        ("n_context_tokens", pa.int64()),  # recorded
        ("n_predicted_tokens", pa.int64()),
        ("fidelity", pa.float64()),  # predicted / recorded
    ]
)

TOOLS = pa.schema(
    [
        ("name", pa.string()),
        ("agent_version", pa.string()),
        ("n_calls", pa.int64()),
        ("source", pa.string()),  # inferred, recorded, override
        ("tool_json", pa.string()),  # OpenAI form
    ]
)

TEACHER_ACTIONS = pa.schema(
    [
        ("state_id", pa.string()),
        ("teacher", pa.string()),
        ("model", pa.string()),
        ("family", pa.string()),
        ("provider", pa.string()),
        ("action_text", pa.string()),
        ("action_tool_calls_json", pa.string()),
        ("finish_reason", pa.string()),
        ("latency_s", pa.float64()),
        ("cost_usd", pa.float64()),
        ("n_prompt_tokens", pa.int64()),
        ("n_completion_tokens", pa.int64()),
        ("n_cached_tokens", pa.int64()),
        ("n_reasoning_tokens", pa.int64()),
        ("n_attempts", pa.int32()),
        ("request_sha", pa.string()),
        ("generation_id", pa.string()),
        ("is_distillable", pa.bool_()),
        ("error_code", pa.string()),
        ("error_message", pa.string()),
        ("gate", pa.string()),
        ("propensity", pa.float64()),
    ]
)

_PAIR = [
    ("pair_id", pa.string()),
    ("state_id", pa.string()),
    ("session_id", pa.string()),
    ("chosen", pa.string()),
    ("rejected", pa.string()),
    ("chosen_action_json", pa.string()),
    ("rejected_action_json", pa.string()),
    ("n_teachers_agreeing", pa.int32()),
    ("n_teachers_asked", pa.int32()),
    ("n_teachers_valid", pa.int32()),
    ("teachers_agreeing", _STRINGS),
    ("agreement_level", pa.string()),
    ("n_against", pa.int32()),  # votes for the student's action, its own included
    ("margin", pa.int32()),
    ("source", pa.string()),
    ("evidence", _STRINGS),  # natural pairs that say the same
    ("rejected_source", pa.string()),
    ("hint", pa.string()),
    ("outcome", pa.string()),
    ("student_model", pa.string()),
    ("shares_vendor", pa.bool_()),
    ("is_distillable", pa.bool_()),
    ("control_mismatch", pa.bool_()),  # null without a control
    ("cost_usd", pa.float64()),
    ("weight", pa.float64()),
]

PROMPT = pa.schema([("state_messages_json", pa.string()), ("tools_json", pa.string())])
"""What a state had shown. At rest a pair names its state; these are put in where they are needed,
since a prefix in every row takes two hundred times the room of the turns it is made of."""

DPO_PAIRS = pa.schema(_PAIR)

POSITIVES = pa.schema(
    [
        ("state_id", pa.string()),
        ("session_id", pa.string()),
        ("action", pa.string()),
        ("action_json", pa.string()),
        ("n_teachers_agreeing", pa.int32()),
        ("n_teachers_asked", pa.int32()),
        ("teachers_agreeing", _STRINGS),
        ("agreement_level", pa.string()),
        ("student_model", pa.string()),
        ("outcome", pa.string()),
        ("is_distillable", pa.bool_()),
        ("cost_usd", pa.float64()),
    ]
)

OUTCOMES = pa.schema(
    [
        ("state_id", pa.string()),
        ("session_id", pa.string()),
        ("outcome", pa.string()),  # pair, agreement, deferred, contested, infeasible, …
        ("level", pa.string()),  # weakest agreement inside the consensus
        ("student_level", pa.string()),  # how close the student comes to the consensus
        ("near_level", pa.string()),  # looser level at which there would be a consensus
        ("n_asked", pa.int32()),
        ("n_valid", pa.int32()),  # answers that vote
        ("n_failed", pa.int32()),
        ("n_invalid", pa.int32()),
        ("n_own_family", pa.int32()),  # answers from the student's own model family
        ("n_agreeing", pa.int32()),
        ("n_against", pa.int32()),
        ("margin", pa.int32()),
        ("is_tie", pa.bool_()),
        ("invalid_reason", pa.string()),  # of the student's action
        ("why", pa.string()),  # what speaks against a pair, in words
    ]
)

NORMALIZED_PAIRS = pa.schema(
    [
        *_PAIR,
        ("chosen_messages_json", pa.string()),
        ("rejected_messages_json", pa.string()),
        ("stats_json", pa.string()),
    ]
)

DROPPED_PAIRS = pa.schema(
    [
        *_PAIR,
        ("drop_operator", pa.string()),
        ("drop_field", pa.string()),
        ("drop_value", pa.string()),
        ("drop_limit", pa.string()),
    ]
)

_TEXTS = frozenset(
    {
        "action",
        "action_text",
        "chosen",
        "drop_value",
        "error_message",
        "generation_id",
        "hint",
        "invalid_reason",
        "pair_id",
        "recovered_by",
        "rejected",
        "request_sha",
        "state_id",
        "thinking",
        "why",
    }
)


def repeating_columns(schema: pa.Schema) -> list[str]:
    """Columns of names and labels: a dictionary shortens them, unlike texts, ids and numbers."""
    return [
        field.name
        for field in schema
        if pa.types.is_string(field.type)
        and not (field.name in _TEXTS or field.name.endswith("_json"))
    ]


TABLES: dict[str, pa.Schema] = {
    "sessions": SESSIONS,
    "turns": TURNS,
    "states": STATES,
    "tools": TOOLS,
    "teacher_actions": TEACHER_ACTIONS,
    "dpo_pairs": DPO_PAIRS,
    "positives": POSITIVES,
    "outcomes": OUTCOMES,
    "normalized_pairs": NORMALIZED_PAIRS,
    "dropped_pairs": DROPPED_PAIRS,
}
"""Every table at rest by name."""

WRITTEN_BY: dict[str, str] = {
    **dict.fromkeys(("sessions", "turns", "states", "tools"), "ingest"),
    "teacher_actions": "replay",
    **dict.fromkeys(("dpo_pairs", "positives", "outcomes"), "pairs"),
    **dict.fromkeys(("normalized_pairs", "dropped_pairs"), "normalize"),
}
"""The command that writes each table."""
