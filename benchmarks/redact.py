"""Redaction: recall on planted secrets, false positives and speed on given texts.

    python benchmarks/redact.py [SESSIONS...] [--code FOLDER...] [--code-mb N]

Without sessions there is no speed. What is found in code that is published, such as the standard
library and installed packages, is taken for a false positive: `--code` samples N MB of its source
files by their names, and shows where each was found.
"""

import argparse
import hashlib
import json
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.planted_secrets import REPEATED, given_away, kinds, planted
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


def repeated(n: int = 400) -> dict[str, object]:
    """Plant values that one text gives away five times more, and count where they are left."""
    redactor, left = Redactor(), Counter[str]()
    for given, value in given_away(n):
        texts = {form: write(value) for form, write in REPEATED.items()}
        _, known = redactor.learn([given.text, *texts.values()])
        left.update(
            form
            for form, text in texts.items()
            if "<SECRET:" not in redactor.text(text, known=known)
        )
    return {"values": n, "forms": len(REPEATED), "left": dict(left)}


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


SUFFIXES = frozenset({".py", ".pyi", ".js", ".ts", ".c", ".h", ".cpp", ".rs", ".go", ".java"})


def in_code(folders: list[Path], max_mb: int) -> dict[str, object]:
    """Search a sample of source files, the same for the same names."""
    names = sorted(
        (hashlib.blake2b(path.relative_to(folder).as_posix().encode()).digest(), path)
        for folder in folders
        for path in folder.rglob("*")
        if path.suffix in SUFFIXES and path.is_file()
    )
    texts: dict[str, Path] = {}
    n_chars = 0
    for _, path in names:
        if n_chars >= max_mb * 1_000_000:
            break
        text = path.read_text("utf-8", "replace")
        n_chars += 0 if text in texts else len(text)
        texts.setdefault(text, path)
    found = [
        f"{hit.kind} in {path.name}:{text.count(chr(10), 0, hit.start) + 1}"
        for (text, path), hits in zip(texts.items(), find_secrets_in(list(texts)), strict=True)
        for hit in hits
    ]
    return {
        "files": len(texts),
        "code_mb": round(n_chars / 1e6, 2),
        "hits_per_mb": round(len(found) / (n_chars / 1e6), 3),
        "hits": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sessions", nargs="*", type=Path)
    parser.add_argument("--code", nargs="*", type=Path, default=[])
    parser.add_argument("--code-mb", type=int, default=30)
    options = parser.parse_args()
    find_secrets_in(["warm up the scanner"])
    report: dict[str, object] = {"recall": recall(), "repeated": repeated()}
    if options.sessions:
        report["sessions"] = false_positives(texts_of(options.sessions))
    if options.code:
        report["code"] = in_code(options.code, options.code_mb)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
