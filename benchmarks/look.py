"""The page of `look` on large folders: what it costs to write, and how soon a browser shows and searches it.

    python benchmarks/look.py SESSIONS... [--megabytes 240 2000] [--json FILE]

The corpus is the sessions, copied under other ids until it is as large as asked. `look` is the command of a
user, in a process of its own. The browser is Chromium (Debian: `apt-get install chromium`) at 1280 by 800
pixels, driven by Playwright, from disk: first paint as it tells it itself, and the milliseconds from a
keystroke in the search to the rows that it leaves.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_CHILD = """
import json, resource, sys
sys.argv = ["replay-pipeline", "look", *sys.argv[1:]]
from replay_pipeline.cli import app
try:
    app(standalone_mode=False)
finally:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print("measured", json.dumps({
        "cpu_s": round(sum(each.ru_utime + each.ru_stime for each in used), 2),
        "rss_mib": max(each.ru_maxrss for each in used) // 1024,
    }))
"""
_UUID = re.compile(rb"\b[0-9a-f]{4}(?=[0-9a-f]{4}-[0-9a-f]{4}-)|(?<=\bmsg_)\w{4}")
_CHROMIUM, _FLAGS = "/usr/bin/chromium", ["--no-sandbox", "--disable-gpu", "--no-first-run"]
_SEARCHED = ("checkpoint", "strategy git", "rewind", "the")
_SEARCH = """async text => {
  const field = document.getElementById("search"), status = document.querySelector("[role=status]");
  const before = status.textContent, began = performance.now();
  field.value = text;
  field.dispatchEvent(new Event("input"));
  while (status.textContent === before && performance.now() - began < 5000)
    await new Promise(ready => setTimeout(ready, 2));
  return [performance.now() - began, status.textContent];
}"""


def copy(sessions: list[Path], folder: Path, n_bytes: int) -> int:
    """Write sessions into `folder`, in each round with other ids, and return the bytes they hold."""
    n_rounds, rest = divmod(n_bytes, sum(path.stat().st_size for path in sessions))
    total = 0
    for path in sessions:
        between = _UUID.split(path.read_bytes())
        for round_ in range(n_rounds + (rest > 0)):
            place = folder / f"project-{round_}" / path.parent.name / f"{round_:04x}{path.name[4:]}"
            place.parent.mkdir(parents=True, exist_ok=True)
            total += place.write_bytes(f"{round_:04x}".encode().join(between))
        rest -= path.stat().st_size
    return total


def written(corpus: Path, page: Path) -> dict[str, Any]:
    """Run the command and return what it took."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(corpus), "--to", str(page), "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("measured "))
    size = sum(path.stat().st_size for path in page.rglob("*") if path.is_file())
    return {
        **json.loads(line.removeprefix("measured ")),
        "wall_s": round(time.monotonic() - began, 1),
        "page_mb": round(size / 1e6, 1),
    }


def seen(page: Path) -> dict[str, Any]:
    """Open the page in a browser, and return how soon it painted and how long searches took."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_CHROMIUM, args=_FLAGS)
        tab = browser.new_page(viewport={"width": 1280, "height": 800})
        is_ready = "document.documentElement.dataset.ready !== undefined"
        tab.goto((page / "index.html").as_uri())
        tab.wait_for_function(is_ready)
        paints = tab.evaluate(
            "performance.getEntriesByType('paint').map(p => [p.name, p.startTime])"
        )
        ready_ms = tab.evaluate("performance.now()")
        tab.goto((page / "index.html").as_uri() + "#/sessions")
        tab.locator("td.title a").first.wait_for()
        searches = {text: tab.evaluate(_SEARCH, text) for text in _SEARCHED}
        browser.close()
    return {
        "paint_ms": {name: round(at) for name, at in paints},
        "shown_ms": round(ready_ms),
        "search_ms": {text: round(took) for text, (took, _) in searches.items()},
        "found": {text: status for text, (_, status) in searches.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sessions", nargs="*", type=Path, help="by default the bundled sample")
    parser.add_argument("--megabytes", nargs="+", type=int, default=[24])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    if not args.sessions:
        from replay_pipeline.testing.sample import SESSIONS_DIR

        args.sessions = [SESSIONS_DIR]
    sessions = sorted(path for each in args.sessions for path in each.rglob("*.jsonl"))
    figures = []
    for size in args.megabytes:
        with tempfile.TemporaryDirectory() as name:
            corpus, page = Path(name) / "sessions", Path(name) / "look"
            n_bytes = copy(sessions, corpus, size * 1_000_000)
            found = {"megabytes": round(n_bytes / 1e6), **written(corpus, page)}
            found["cpu_s_per_240_mb"] = round(found["cpu_s"] * 240e6 / n_bytes, 2)
            try:
                found |= seen(page)
            except ImportError:
                found["browser"] = "not measured: pip install 'replay-pipeline[browser]'"
            figures.append(found)
            print(json.dumps(found, indent=1, ensure_ascii=False))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
