"""Twenty calls of the public interface that are wrong: a misspelt keyword, or a value of a wrong type.

Never run: `test_typed_interface.py` asks the type checker about it.
"""

from pathlib import Path

from replay_pipeline import (
    DEFAULT_TEACHERS,
    ClaudeCodeIngester,
    DJNormalizer,
    Settings,
    TeacherAction,
    TeacherSpec,
    TraceState,
    canonical_action,
    consensus_reward,
    extract_dpo_pairs,
    open_traces,
    replay_and_normalize_trace,
    replay_and_normalize_trace_sync,
    replay_trace,
)
from replay_pipeline.replay import (
    control,
    replay_in_thread,
    replay_states,
    replay_trace_sync,
)

state: TraceState = {
    "state_id": "s",
    "messages": [{"role": "user", "content": "What now?"}],
    "student_action": {"role": "assistant", "content": "ls"},
}

asked = replay_trace([state], max_total_us=1.0)  # wrong
asked = replay_trace([state], DEFAULT_TEACHERS, "1.0")  # wrong
asked = replay_trace([state], windw="full")  # wrong
replay_trace_sync([state], max_concurency=8)  # wrong
replay_trace_sync([state], level="efect")  # wrong
asked = replay_states([state], max_total_usd=1.0, ledgr="ledger.sqlite")  # wrong
replay_in_thread([state], max_total_usd=1.0, limits_usd={"day": "2"})  # wrong
asked = replay_and_normalize_trace([state], agreement_treshold=2)  # wrong
replay_and_normalize_trace_sync([state], recipe=3)  # wrong
extract_dpo_pairs([state], [], agreement_threshold="2")  # wrong
DJNormalizer(recipee="default")  # wrong
control([state], max_total_usd=1.0, n_state=50)  # wrong
canonical_action({"role": "assistant", "content": "ls"}, cwdir="/")  # wrong
consensus_reward("ls")  # wrong
ClaudeCodeIngester().ingest(42)  # wrong
open_traces(Path("out")).materialize(windw="full")  # wrong
TeacherAction(state_id="s", teacher="t", cost="0.1")  # wrong
Settings.load(data="x")  # wrong
TeacherSpec(name="t", model="a/b", timeout="10")  # wrong
