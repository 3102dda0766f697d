"""Report what was done for each batch and what it cost, without reading any table."""

from typing import Any

from replay_pipeline.replay import has_ledger, ledger_status
from replay_pipeline.stages.chain import by_batch
from replay_pipeline.stages.receipts import Overview
from replay_pipeline.stages.replay import is_play, open_work


def status_of(overview: Overview) -> dict[str, Any]:
    """Return the finished stages and cost of each batch, and the contents of the ledger."""
    settings, receipts = overview.settings, overview.receipts
    stages = [stage for stage in by_batch() if stage.told]
    done = {stage.name: receipts.reports(stage.name) for stage in stages}
    url = settings.ledger_url()
    ledger = {"ledger": "none yet", "spent_usd": 0.0, "held_usd": 0.0, "unknown_usd": 0.0,
              "calls": {}}  # fmt: skip
    if has_ledger(url):
        ledger = ledger_status(url).to_json()
    keys, replays = overview.batches(), done["replay"]
    waiting = [report for key, report in done["ingest"].items() if key not in replays]
    rehearsed = [key for key in keys if is_play(replays.get(key, {}))]
    return {
        "batches": {
            key: {
                # Answers that were made up are no answers.
                "rehearsal" if done[stage.name] is replays and is_play(report) else stage.name: (
                    report.get(stage.told)
                )
                for stage in stages
                if (report := done[stage.name].get(key)) is not None
            }
            for key in keys
        },
        "teachers": [teacher.name for teacher in settings.teachers()],
        "played": settings.played,
        "ledger": ledger,
        "dataset": receipts.reports("publish").get("all"),
        "open": open_work(
            list(replays.values()),
            n_states_waiting=sum(report.get("n_states") or 0 for report in waiting),
        )
        | {"max_total_usd": settings.replay.max_total_usd},
        "rehearsed": rehearsed,
        "fidelity": {
            key: done["ingest"][key].get("fidelity") for key in keys if key in done["ingest"]
        },
    }
