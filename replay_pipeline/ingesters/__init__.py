"""Turn sessions of coding agents into trace states."""

from replay_pipeline.actions.windows import WindowPolicy, parse_window
from replay_pipeline.ingesters.base import SourceSlice
from replay_pipeline.ingesters.batches import (
    ReadMark,
    TraceBatch,
    default_sources,
    discover,
    is_kept,
    is_there,
    keep,
    kept_files,
    list_batches,
    list_manifests,
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
from replay_pipeline.ingesters.log_rows import state_id_of
from replay_pipeline.ingesters.traces import (
    ClaudeCodeIngester,
    LazyStates,
    Traces,
    open_traces,
    system_prompt,
)

__all__ = [
    "ClaudeCodeIngester",
    "IngestReport",
    "IngestResult",
    "LazyStates",
    "ReadMark",
    "SourceSlice",
    "TraceBatch",
    "Traces",
    "WindowPolicy",
    "default_sources",
    "discover",
    "ingest",
    "is_kept",
    "is_there",
    "keep",
    "kept_files",
    "list_batches",
    "list_manifests",
    "manifest_from",
    "open_traces",
    "parse_window",
    "read_manifest",
    "restore",
    "state_id_of",
    "system_prompt",
    "without_states",
    "write_manifest",
    "write_traces",
]
