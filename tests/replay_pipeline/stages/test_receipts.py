from replay_pipeline.stages.receipts import Receipt, Receipts, now
from replay_pipeline.stages.views.summary import summarize


def receipt(stage: str, batch: str, **report) -> Receipt:
    return Receipt(stage=stage, batch=batch, version=1, report=report, seconds=1.0)


def test_the_summary_counts_calls_of_this_run_and_answers_of_all(tmp_path):
    receipts = Receipts(tmp_path)
    paid = {"is_complete": True, "newly_spent_usd": 0.0, "unknown_usd": 0.0}
    receipts.write(receipt("replay", "old", n_sent=5, n_answers=5, spent_usd=1.0, **paid))
    before = now()
    receipts.write(receipt("replay", "new", n_sent=2, n_answers=2, spent_usd=0.5, **paid))
    receipts.write(receipt("normalize", "old", n_kept=1, dropped={"length": 2}))
    receipts.write(receipt("normalize", "new", n_kept=1, dropped={"length": 1, "words": 1}))
    figures = summarize(list(receipts.all(since=before)))
    assert figures["calls"] == 2
    assert figures["answers"] == 7
    assert figures["spent_usd"] == 1.5
    assert figures["dropped"] == {"length": 3, "words": 1}
    assert figures["seconds"]["replay"] == 1.0
