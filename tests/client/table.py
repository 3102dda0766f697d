"""How many of the messages that each version sent are in the prefix, conversation by conversation.

    python -m tests.client.table [--keep FOLDER]

has every conversation with every version (an hour of one core; what lies in FOLDER is not had again), and writes
`tests/client/table.json` and the table in `docs/ingest.md`.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from tempfile import mkdtemp

from tests.client.clients import VERSIONS
from tests.client.conversations import CONVERSATIONS
from tests.client.lab import Lab

TABLE = Path(__file__).parent / "table.json"
DOCS = Path(__file__).parents[2] / "docs" / "ingest.md"
_BEGIN, _END = "<!-- written by tests/client/table.py -->\n", "<!-- end -->"
Count = list[int]
"""Messages that are equal, and those that were sent."""


def measured(lab: Lab, version: str, name: str) -> Count:
    """Return the count of one conversation with one version."""
    found, _ = lab.compared(version, name)
    return [sum(each.n_equal for each in found), sum(each.n_sent for each in found)]


def lines_of(table: dict[str, dict[str, Count]]) -> list[str]:
    """Return the table as lines of Markdown, in percent."""
    lines = ["| version | equal | least, in |", "|---|---|---|"]
    for version, counts in table.items():
        whole = [sum(count[n] for count in counts.values()) for n in range(2)]
        name = min(counts, key=lambda each: counts[each][0] / max(counts[each][1], 1))
        least = f"{_cell(counts[name])}, {name}" if _cell(counts[name]) != "100" else "–"
        lines.append(f"| {version} | **{_cell(whole)}** | {least} |")
    return lines


def _cell(count: Count) -> str:
    equal, sent = count
    return "100" if equal == sent else str(min(99, round(100 * equal / max(sent, 1))))


def main() -> None:
    """Measure, and write the table down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    lab = Lab(options.keep or Path(mkdtemp()))
    table: dict[str, dict[str, Count]] = {}
    for version in VERSIONS:
        for name in CONVERSATIONS:
            count = measured(lab, version, name)
            table.setdefault(version, {})[name] = count
            sys.stdout.write(f"{version} {name} {count}\n")
    rows = [f"{json.dumps(version)}: {json.dumps(counts)}" for version, counts in table.items()]
    TABLE.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    rows = "\n".join(lines_of(table))
    pattern = re.compile(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", re.DOTALL)
    text = pattern.sub(lambda _: f"{_BEGIN}{rows}\n{_END}", DOCS.read_text("utf-8"))
    DOCS.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
