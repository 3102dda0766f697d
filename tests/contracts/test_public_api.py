"""What other code may rely on."""

import json
import subprocess
import sys

import replay_pipeline

SPECIFIED = {
    "ClaudeCodeIngester", "DEFAULT_TEACHERS", "DJNormalizer", "DPOPair", "FRONTIER_TEACHERS",
    "NormalizedDPOPair", "ReplayReport", "TeacherAction", "TeacherSpec", "TraceState",
    "agreement_level", "canonical_action", "extract_dpo_pairs", "open_traces", "replay_trace",
    "replay_and_normalize_trace", "replay_and_normalize_trace_sync",
}  # fmt: skip

HEAVY = {"torch", "dagster", "data_juicer", "datasets", "transformers", "trl", "polars", "rich"}


def modules_after(statement: str) -> set[str]:
    code = f"{statement}; import sys, json; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_every_specified_name_is_there():
    assert set(replay_pipeline.__all__) >= SPECIFIED
    for name in replay_pipeline.__all__:
        assert getattr(replay_pipeline, name) is not None


def test_importing_the_pipeline_loads_no_heavy_package():
    assert HEAVY.isdisjoint(modules_after("import replay_pipeline"))


def test_help_of_the_command_line_loads_no_heavy_package():
    loaded = modules_after("import replay_pipeline.cli")
    assert (HEAVY - {"rich"}).isdisjoint(loaded)
