"""Every figure of the card, worked out again from the rows that a reader of the dataset has."""

import re
from collections import Counter
from itertools import pairwise

import pyarrow.parquet as pq
import pytest

from replay_pipeline.publish import publish
from tests.replay_pipeline.publish.rows import kept_row, kept_table, positives_table


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of four batches one has pairs and positives, one pairs, one positives, and one nothing."""
    folder = tmp_path_factory.mktemp("figures") / "set"
    mixed = [
        kept_row(n, session=f"s{n % 5}" + (".agent-a1" if n % 2 else ""))
        | {
            "agreement_level": ("exact", "target")[n % 4 == 0],
            "outcome": ("ok", "tool_error")[n % 3 == 0],
            "student_model": f"student-{n % 2}",
            "shares_vendor": n % 6 == 0,
            "teachers_agreeing": [["deepseek", "qwen"], ["deepseek", "glm", "qwen"]][n % 5 == 0],
        }
        for n in range(24)
    ]
    publish(
        [
            ("b1", kept_table(*mixed[:15])),
            ("b2", kept_table(*mixed[15:])),
            ("b3", kept_table()),
            ("b4", kept_table()),
        ],
        positives=[("b1", positives_table(50, 51)), ("b3", positives_table(52))],
        folder=folder,
        test_fraction=0.3,
        card_facts={"ingest": {key: {"n_states": 100} for key in ("b1", "b2", "b3", "b4")}},
    )
    return folder


@pytest.fixture(scope="module")
def card(folder):
    return (folder / "README.md").read_text("utf-8")


@pytest.fixture(scope="module")
def rows(folder):
    """Rows by config and split, as they lie in the files."""
    found = {}
    for path in sorted(folder.glob("data/*/*/**/*.parquet")):
        config, split = path.relative_to(folder).parts[1:3]
        read = pq.read_table(path, partitioning=None).to_pylist()
        found.setdefault(config, {}).setdefault(split, []).extend(read)
    return found


def every(rows, *configs):
    return [row for config in configs or rows for part in rows[config].values() for row in part]


def table(card, head):
    """The rows of the table of the card whose first cell is `head`."""
    lines = card.split(f"| {head} |", 1)[1].split("\n")[2:]
    cells = []
    for line in lines:
        if not line.startswith("|"):
            break
        cells.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return cells


def number(text):
    return int(text.replace(",", ""))


def test_sessions_conversations_and_batches_are_those_that_have_rows(card, rows):
    told = re.search(r"(\d+) conversations of (\d+) sessions in (\d+) trace batches", card)
    assert told is not None
    names = ("conversation", "session_id", "trace_batch")
    counted = [len({row[name] for row in every(rows)}) for name in names]
    assert list(map(int, told.groups())) == counted
    assert counted[2] == 3


def test_rows_by_config_and_split(card, rows):
    told = {name: (number(train), number(test)) for name, _, train, test in table(card, "config")}
    assert told == {
        config: tuple(len(parts.get(split, [])) for split in ("train", "test"))
        for config, parts in rows.items()
    }


@pytest.mark.parametrize(
    ("head", "column"),
    [
        ("agreement", "agreement_level"),
        ("recorded outcome", "outcome"),
        ("source", "source"),
        ("agent's model", "student_model"),
    ],
)
def test_counts_and_shares(card, rows, head, column):
    pairs = every(rows, "pairs")
    counted = Counter(row[column] for row in pairs)
    assert {(name, number(n), share) for name, n, share in table(card, head)} == {
        (name, n, f"{100 * n / len(pairs):.1f} %") for name, n in counted.items()
    }


def test_votes_hints_vendors_and_terms(card, rows):
    pairs = every(rows, "pairs")
    votes = Counter(name for row in pairs for name in row["teachers_agreeing"])
    assert {name: number(n) for name, n, *_ in table(card, "teacher")} == votes
    n_hints = sum(row["hint"] is not None for row in pairs)
    n_vendor = sum(row["shares_vendor"] for row in pairs)
    assert f"{100 * n_hints / len(pairs):.1f} % of the pairs carry a hint" in card
    assert f"In {100 * n_vendor / len(pairs):.1f} % an agreeing teacher" in card
    n_distillable = sum(row["is_distillable"] for row in pairs)
    assert f"true for {n_distillable} of {len(pairs)} pairs" in card
    assert n_distillable == len(every(rows, "pairs_distillable"))


def test_lengths(card, rows):
    head = re.search(r"\| config \| ((?:≤ [\d,]+ \| )+)longest \|", card)
    assert head is not None
    limits = [number(each) for each in re.findall(r"≤ ([\d,]+)", head[1])]
    body = card.split(head[0], 1)[1].split("\n\n")[0]
    for config in ("pairs", "pairs_8k"):
        lengths = [row["n_tokens"] for row in every(rows, config)]
        (line,) = (line for line in body.split("\n") if line.startswith(f"| `{config}` |"))
        *counted, longest = map(int, re.findall(r"\d+", line.split("|", 2)[2]))
        assert longest == max(lengths)
        bounds = [0, *limits]
        assert counted == [sum(low < n <= high for n in lengths) for low, high in pairwise(bounds)]


def test_what_stages_counted_is_told_of_the_batches_that_have_rows(card):
    assert ["states of recorded sessions", "300"] in table(card, "step")
