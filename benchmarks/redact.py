"""Redaction: recall on planted secrets, false positives and speed on given texts.

    python benchmarks/redact.py [SESSIONS...]

Without sessions there is no speed and no rate of false positives: nothing that is planted is
innocent.
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.planted_secrets import kinds, planted
from replay_pipeline.ingesters import ingest
from replay_pipeline.redaction.redactor import Redactor, find_secrets_in


def recall() -> dict[str, object]:
    texts = [p for seed in range(4) for p in planted(seed)]
    redactor = Redactor()
    survived = Counter(
        f"{p.kind} in {p.context}"
        for p in texts
        if any(form in redactor.text(p.text) for form in p.forms)
    )
    return {"planted": len(texts), "kinds": len(kinds()), "survived": dict(survived)}


def texts_of(paths: list[Path]) -> list[str]:
    result = ingest(paths, redact=False)
    texts: set[str] = set(result.states["action_text"].to_pylist())
    for document in result.turns["messages_json"].to_pylist():
        texts.update(message["content"] for message in msgspec.json.decode(document))
    for calls in filter(None, result.states["action_tool_calls_json"].to_pylist()):
        texts.update(call["function"]["arguments"] for call in msgspec.json.decode(calls))
    return sorted(texts)


def false_positives(texts: list[str]) -> dict[str, object]:
    n_mb = sum(map(len, texts)) / 1e6
    start = time.process_time()
    hits = [hit for found in find_secrets_in(texts) for hit in found]
    scan_s = time.process_time() - start
    redactor = Redactor()
    start = time.process_time()
    redactor.prepare(texts)
    redact_s = time.process_time() - start
    return {
        "texts_mb": round(n_mb, 2),
        "hits_per_mb": round(len(hits) / n_mb, 3),
        "hits_by_kind": dict(Counter(hit.kind for hit in hits)),
        "scan_mb_per_s": round(n_mb / scan_s, 1),
        "redact_mb_per_s": round(n_mb / redact_s, 1),
    }


def main() -> None:
    find_secrets_in(["warm up the scanner"])
    report: dict[str, object] = {"recall": recall()}
    if len(sys.argv) > 1:
        report["sessions"] = false_positives(texts_of([Path(a) for a in sys.argv[1:]]))
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
