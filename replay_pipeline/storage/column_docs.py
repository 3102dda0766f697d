"""What each column of each table means: shown in Dagster, in the docs, and to whoever asks."""

from replay_pipeline.storage.schemas import TABLES

_ANYWHERE = {
    "action_text": "Text of the action; empty where there is none, null where there is no action.",
    "action_tool_calls_json": "Tool calls of the action, as a JSON list in the OpenAI form.",
    "agreement_level": "Weakest agreement inside the consensus: `exact`, `effect`, `target`, `tool`.",
    "chosen": "Canonical text of the better action.",
    "chosen_action_json": "The better action as an assistant message in canonical form.",
    "control_mismatch": "Whether the student's own model, asked again, left its recorded action.",
    "cost_usd": "US dollars paid for all answers at this state.",
    "cwd": "Working directory of the session at this point.",
    "hint": "What went wrong at this step, in words: the error text or the user's feedback.",
    "is_distillable": "Whether the terms of every teacher in it allow training on its answers.",
    "evidence": "What the record itself says for the better action: `rewind`, `rejection`.",
    "margin": "Votes of the consensus minus votes of the strongest other side, the student's included.",
    "model": "Model that answered, as its endpoint names it.",
    "n_against": "Votes for the student's action: the student, and every family that sides with it.",
    "n_teachers_agreeing": "Model families in the consensus; 0 for pairs that needed no teacher.",
    "n_teachers_asked": "Teachers that were asked.",
    "n_teachers_valid": "Teachers whose answer is an action that could run.",
    "outcome": "What became of the recorded action: `ok`, `tool_error`, `user_rejected`, …",
    "pair_id": "Id of the pair: its state and its two sides.",
    "rejected": "Canonical text of the worse action.",
    "rejected_action_json": "The worse action as an assistant message in canonical form.",
    "rejected_source": "`recorded`, or `sampled` from the model to be trained.",
    "segment": "Number of compactions before this point.",
    "session_id": "The session it belongs to.",
    "shares_vendor": "Whether an agreeing teacher comes from the student's own vendor.",
    "source": "`consensus` of teachers, a `rewind` in the session, or the user's `rejection`.",
    "state_id": "Id of the decision point; stable under copies of the log and re-ingestion.",
    "student_model": "Model that acted in the session.",
    "teachers_agreeing": "Names of the teachers in the consensus.",
    "turn_idx": "Position of the turn in its session.",
    "weight": "How much the pair should count in training; 1 is a plain unanimous pair.",
}

_IN_TABLE = {
    "sessions": {
        "agent": "Program that wrote the log, e.g. `claude_code`.",
        "agent_id": "Id of the subagent; null for a main session.",
        "first_timestamp": "Earliest time in the log.",
        "last_timestamp": "Latest time in the log.",
        "models": "Models that acted in it.",
        "n_rows": "Rows of the log.",
        "n_rows_used": "Rows that became part of a turn.",
        "n_states": "Decision points.",
        "n_turns": "Turns.",
        "parent_session_id": "Session that started this subagent.",
        "project": "Hash of the project folder, or its redacted path where hashing is off.",
        "skipped_json": "Rows that are in no turn, by reason.",
        "source_offset_bytes": "How far the file was read.",
        "source_path_sha": "Hash of the file's path.",
        "source_size_bytes": "Size of the file when it was read.",
        "source_tail_sha": "Hash of the bytes before the offset: tells growth from rewriting.",
        "versions": "Versions of the program that wrote it.",
    },
    "turns": {
        "flags": "Marks of the turn, e.g. `meta`, `interrupt`, `compact_summary`.",
        "kind": "`user`, `assistant`, `meta`, `summary`, …",
        "messages_json": "What it adds to a prefix: a user message, or tool results after an "
        "assistant message; an action that is a row of `states` is stored only there.",
        "model": "Model that wrote the turn.",
        "n_cache_creation_tokens": "Recorded prompt tokens written to the provider's cache.",
        "n_cache_read_tokens": "Recorded prompt tokens read from the provider's cache.",
        "n_input_tokens": "Recorded prompt tokens outside the cache.",
        "n_output_tokens": "Recorded completion tokens.",
        "parent_turn_idx": "The turn before it on its path; null for a root.",
        "thinking": "Recorded thinking, never part of a prefix.",
        "timestamp": "When it was written.",
    },
    "states": {
        "depth": "Turns on the path before it.",
        "error_kind": "Kind of the error that the action met.",
        "fidelity": "Predicted prefix tokens over the recorded ones.",
        "n_context_tokens": "Prompt tokens that the provider recorded.",
        "n_predicted_tokens": "Prompt tokens predicted from the prefix.",
        "recovered_by": "State of the later action that put it right.",
        "siblings": "States with the very same prefix: the session went back and did otherwise.",
    },
    "tools": {
        "agent_version": "Release series of the program, e.g. `2.1`.",
        "n_calls": "Calls it was learnt from.",
        "name": "Name of the tool.",
        "source": "`inferred` from calls, `recorded` in the log, or an `override`.",
        "tool_json": "The tool in the OpenAI form.",
    },
    "teacher_actions": {
        "cost_usd": "US dollars paid for the call.",
        "error_code": "Why the call gave no usable action; null when it did.",
        "error_message": "The same in words, with what to do.",
        "family": "Model family of the teacher: one family is one vote.",
        "finish_reason": "Why the model stopped.",
        "gate": "The gating policy that let the question through.",
        "generation_id": "Id of the answer at the endpoint.",
        "is_distillable": "Whether the model's terms allow training on its answers.",
        "latency_s": "Seconds from sending to the whole answer.",
        "n_attempts": "Times the request was sent.",
        "n_cached_tokens": "Prompt tokens read from the provider's cache.",
        "n_completion_tokens": "Completion tokens, reasoning included.",
        "n_prompt_tokens": "Prompt tokens.",
        "n_reasoning_tokens": "Completion tokens spent on reasoning.",
        "propensity": "Probability with which the question was asked.",
        "provider": "Provider that served the model.",
        "request_sha": "Hash of the canonical request: equal requests are paid once.",
        "teacher": "Name of the teacher.",
    },
    "positives": {
        "action": "Canonical text of the action on which teachers and student agree.",
        "action_json": "The same as an assistant message.",
    },
    "outcomes": {
        "invalid_reason": "Why the student's action could not run.",
        "is_tie": "Whether two groups were equally large and large enough.",
        "level": "Weakest agreement inside the consensus.",
        "n_agreeing": "Model families in the largest group.",
        "n_asked": "Teachers that were asked.",
        "n_failed": "Calls that failed.",
        "n_invalid": "Answers that are no action that could run.",
        "n_own_family": "Answers from the student's own model family, which do not vote.",
        "n_valid": "Answers that vote.",
        "near_level": "Looser level at which there would be a consensus.",
        "outcome": "`pair`, `agreement`, `no_consensus`, `too_few_answers`, `invalid_action`, or why "
        "a consensus made no pair: `deferred`, `contested`, `infeasible`, `refusal`, `early_stop`.",
        "student_level": "How close the student comes to the consensus.",
        "why": "What speaks against a pair, in words.",
    },
    "normalized_pairs": {
        "chosen_messages_json": "The better action as a list of messages.",
        "rejected_messages_json": "The worse action as a list of messages.",
        "stats_json": "Statistics by which the recipe judged the pair.",
    },
    "dropped_pairs": {
        "drop_field": "Side or field that failed.",
        "drop_limit": "The limit it broke.",
        "drop_operator": "Operator that dropped the pair.",
        "drop_value": "The value it was dropped for.",
    },
}

ABOUT = {
    "sessions": "One row per conversation log, subagents apart.",
    "turns": "One row per message group; a state's prefix is the path of turns to the root.",
    "states": "One row per decision point.",
    "tools": "One row per tool and release series, as inferred from the calls.",
    "teacher_actions": "One row per question that was decided, failed calls included.",
    "dpo_pairs": "One row per preference.",
    "positives": "One row per state at which the teachers agree with the student.",
    "outcomes": "One row per state: what the votes came to.",
    "normalized_pairs": "The pairs that passed the recipe.",
    "dropped_pairs": "The pairs that did not, each with its reason.",
}
"""What a row of each table is."""


def describe(table: str, column: str) -> str:
    """What `column` of `table` means; raises KeyError where nothing is written about it."""
    own = _IN_TABLE.get(table, {})
    return own[column] if column in own else _ANYWHERE[column]


def tables_page() -> str:
    """The page `docs/tables.md`."""
    parts = [
        "# Tables",
        "Every table lies under the data root as "
        "`<table>/trace_batch=<key>/part-0.parquet`: zstd, an explicit schema, and the key "
        "`schema_version` in the file's metadata. Equal rows give equal bytes.",
    ]
    for name, schema in TABLES.items():
        rows = [f"| `{f.name}` | {f.type} | {describe(name, f.name)} |" for f in schema]
        parts += [
            f"## {name}",
            ABOUT[name],
            "\n".join(["| column | type | meaning |", "|---|---|---|", *rows]),
        ]
    return "\n\n".join(parts) + "\n"
