"""Unsloth, real and unmodified on the CPU: its model in TRL's trainer, on sessions of real length."""

import json
from pathlib import Path

RECIPE = Path(__file__).parents[3] / "recipes" / "unsloth" / "dpo.py"


def test_two_steps_on_every_row(sessions, rows_of, run, tmp_path):
    rows = rows_of("unsloth")
    output = run(
        "python",
        RECIPE,
        *("--model", sessions / "model", "--output", tmp_path),
        *("--data", sessions / "exports" / "unsloth" / "train.jsonl"),
        *("--max-length", 4096, "--max-steps", 2, "--accumulate", 1),
    )
    report = json.loads((tmp_path / "report.json").read_text("utf-8"))
    assert "Unsloth 2026" in output
    assert (report["rows"], report["used"], report["steps"]) == (len(rows), len(rows), 2)
    assert report["loss"] > 0
    assert (tmp_path / "adapter_model.safetensors").stat().st_size > 1_000
