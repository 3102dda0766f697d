import io
import re
import time

import pytest
import typer
from rich.console import Console

from replay_pipeline.cli import bars, console
from replay_pipeline.cli.bars import StageProgress
from replay_pipeline.cli.console import show_replay
from replay_pipeline.cli.shared import exit_if_most_failed
from replay_pipeline.types import Progress


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
        }
    )
    shown = written.getvalue()
    assert all(name.replace(":", " ") in shown for name in shared)
    assert "run 1" not in shown
    assert "partition" not in shown


def test_a_teacher_that_stopped_changes_the_exit_code(capsys):
    work = {"errors": {}, "n_answers": 9, "stop_reasons": {"completed": 1, "teacher_stopped": 2}}
    with pytest.raises(typer.Exit) as ended:
        exit_if_most_failed(work)
    assert ended.value.exit_code == 1
    assert "a teacher stopped in 2 batches" in capsys.readouterr().err
    exit_if_most_failed({**work, "stop_reasons": {"completed": 3, "budget": 1}})


def test_the_table_of_a_replay_says_who_was_stopped_and_until_when_money_is_held(capsys):
    report = {
        "n_sent": 3, "n_cached": 0, "n_answers": 0, "n_failed": 3, "newly_spent_usd": 0.0,
        "failed_usd": 0.0284, "errors": {"malformed_reply": 3},
        "stop_reason": "teacher_stopped", "stopped_teachers": {"t": "it begins: <html>"},
        "held_until": "2026-01-02T03:04:05+00:00", "unknown_usd": 0.0284,
    }  # fmt: skip
    show_replay({"b": report})
    told = " ".join(capsys.readouterr().out.split())
    assert "3 of 3 questions got no answer that can be used (malformed_reply 3). $0.0284" in told
    assert "t was asked no more: it begins: <html>" in told
    assert "hold $0.0284 until 2026-01-02T03:04:05+00:00" in told


def test_a_bar_in_a_terminal_of_80_columns_has_amount_dollars_rate_and_time_left(monkeypatch):
    written = io.StringIO()
    screen = Console(file=written, width=80, force_terminal=True, color_system=None, emoji=False)
    monkeypatch.setattr(bars, "err", screen)
    with bars.progress_bars() as on_progress:
        for n in range(0, 12_001, 1_000):
            on_progress(
                Progress(stage="replay", n_done=n, n_total=12_000, cost_usd=n / 1e3, limit_usd=20.0)
            )
            time.sleep(0.01)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue())
    last = [line for line in shown.replace("\r", "\n").split("\n") if "12,000 of 12,000" in line][
        -1
    ]
    assert re.search(r"12,000 of 12,000 \$12\.0000 of \$20\.00 [\d,.]+/s +\d\d:\d\d", last)
    assert len(last.rstrip()) <= 80


def test_an_estimate_by_an_old_price_list_says_of_which_day_it_is(capsys):
    row = {
        "teacher": "t", "model": "a/b", "n_calls": 1, "n_prompt_tokens": 2, "expected_usd": 0.1,
        "bound_usd": 0.2, "adaptations": (), "price_source": "https://x/v1/models",
    }  # fmt: skip
    rest = {
        "expected_usd": 0.0, "bound_usd": 0.2, "low_usd": 0.0, "high_usd": 0.0, "ceiling_usd": 1.0,
        "words": [], "covered": None, "n_answered": 0, "pairs": (0, 0), "lessons": (0, 0),
        "positives": (0, 0), "pairs_right": (0, 1), "lessons_right": (0, 1),
        "positives_right": (0, 1), "answers": (0, 0), "answers_right": (0, 1),
    }  # fmt: skip
    for day, is_told in (("2026-01-02T03:04:05+00:00", True), ("2999-01-02", False), ("", False)):
        console.show_estimate({**rest, "teachers": [{**row, "price_date": day}]})
        told = "Prices are of 2026-01-02: https://x/v1/models could not be asked again."
        assert (told in capsys.readouterr().out) is is_told


def test_a_total_that_was_announced_stays_whatever_the_parts_say():
    """What was announced as 3,544 questions turned to 6,430 when a batch was gone through again."""
    stage = StageProgress()
    seen = [stage.whole(Progress(stage="replay", n_done=0, n_total=3_544))]
    for part, size in (("b1", 3_000), ("b2", 3_430)):
        for n_done in range(0, size + 1, 500):
            progress = Progress(stage="replay", n_done=n_done, n_total=size, part=part)
            seen.append(stage.whole(progress))
    assert {each.n_total for each in seen} == {3_544}
    done = [each.n_done for each in seen]
    assert done == sorted(done)
    assert done[-1] == 3_544
