"""Turn sessions of coding agents into trace states."""

from replay_pipeline.ingesters.batches import (
    TraceBatch,
    default_sources,
    discover,
    is_kept,
    is_there,
    keep,
    manifest_from,
    read_manifest,
    restore,
    write_manifest,
)
from replay_pipeline.ingesters.corpus import (
    IngestReport,
    IngestResult,
    ingest,
    write_traces,
)
from replay_pipeline.ingesters.increments import without_states
from replay_pipeline.ingesters.traces import (
    ClaudeCodeIngester,
    LazyStates,
    Traces,
    open_traces,
)

__all__ = [
    "ClaudeCodeIngester",
    "IngestReport",
    "IngestResult",
    "LazyStates",
    "TraceBatch",
    "Traces",
    "default_sources",
    "discover",
    "ingest",
    "is_kept",
    "is_there",
    "keep",
    "manifest_from",
    "open_traces",
    "read_manifest",
    "restore",
    "without_states",
    "write_manifest",
    "write_traces",
]
