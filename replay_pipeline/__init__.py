"""Turn Claude Code sessions into a preference dataset.

Start with `docs/tutorial.md`. In the code, start with `types.py` (the records) and `stages/` (the
whole chain as plain calls). Names are loaded on first use, so the import is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replay_pipeline.actions import agreement_level, canonical_action, consensus_reward
    from replay_pipeline.ingesters import ClaudeCodeIngester, open_traces
    from replay_pipeline.judge.extract import extract_dpo_pairs
    from replay_pipeline.normalize import DJNormalizer
    from replay_pipeline.replay import replay_trace
    from replay_pipeline.settings import DEFAULT_TEACHERS, FRONTIER_TEACHERS, Settings
    from replay_pipeline.stages.pipeline import (
        Pipeline,
        replay_and_normalize_trace,
        replay_and_normalize_trace_sync,
    )
    from replay_pipeline.types import (
        DPOPair,
        NormalizedDPOPair,
        ReplayReport,
        TeacherAction,
        TeacherSpec,
        TraceState,
    )

__version__ = "0.1.0"

_HOME = {
    "ClaudeCodeIngester": "ingesters",
    "DEFAULT_TEACHERS": "settings",
    "DJNormalizer": "normalize",
    "DPOPair": "types",
    "FRONTIER_TEACHERS": "settings",
    "NormalizedDPOPair": "types",
    "Pipeline": "stages.pipeline",
    "ReplayReport": "types",
    "Settings": "settings",
    "TeacherAction": "types",
    "TeacherSpec": "types",
    "TraceState": "types",
    "agreement_level": "actions",
    "canonical_action": "actions",
    "consensus_reward": "actions",
    "extract_dpo_pairs": "judge.extract",
    "open_traces": "ingesters",
    "replay_and_normalize_trace": "stages.pipeline",
    "replay_and_normalize_trace_sync": "stages.pipeline",
    "replay_trace": "replay",
}

__all__ = [
    "DEFAULT_TEACHERS",
    "FRONTIER_TEACHERS",
    "ClaudeCodeIngester",
    "DJNormalizer",
    "DPOPair",
    "NormalizedDPOPair",
    "Pipeline",
    "ReplayReport",
    "Settings",
    "TeacherAction",
    "TeacherSpec",
    "TraceState",
    "agreement_level",
    "canonical_action",
    "consensus_reward",
    "extract_dpo_pairs",
    "open_traces",
    "replay_and_normalize_trace",
    "replay_and_normalize_trace_sync",
    "replay_trace",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
