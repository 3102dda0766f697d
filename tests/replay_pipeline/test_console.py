import io

from rich.console import Console

from replay_pipeline.cli import console


def test_the_limits_that_runs_share_are_shown_however_many_runs_there_are(monkeypatch):
    shared = ["day:2026-01-02", "night:2026-01-02", "tag:trial", "teacher:glm"]
    of_one = [f"{kind}:{i:03d}" for kind in ("partition", "run") for i in range(200)]
    money = {"spent_usd": 0.5, "held_usd": 0.0, "unknown_usd": 0.0, "limit_usd": 5.0}
    written = io.StringIO()
    monkeypatch.setattr(console, "out", Console(file=written, width=200))
    console.show_status(
        {
            "batches": {"000": {}},
            "ledger": {"scopes": [{"scope": name, **money} for name in sorted(shared + of_one)]},
            "played": None,
            "other_ledgers_usd": {},
        }
    )
    shown = written.getvalue()
    assert all(name in shown for name in shared)
    assert "run:199" in shown
    assert "run:000" not in shown
