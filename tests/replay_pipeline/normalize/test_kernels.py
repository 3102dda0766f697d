"""Our kernels decide as data-juicer's own operators do."""

import random
import string

import pyarrow as pa
import pytest

from replay_pipeline.normalize import data_juicer, stock
from replay_pipeline.normalize.kernels import (
    character_class,
    repetition_ratio,
    text_digests,
    text_stats,
)

data_juicer.load()
from data_juicer.ops.common.special_characters import SPECIAL_CHARACTERS  # noqa: E402

SPECIAL = character_class(SPECIAL_CHARACTERS)

PIECES = [
    " ", "  ", "\n", "\t", "\r\n", "\u00a0", "\u3000", "\u200b", "\x0b", "\x1c", "\x00",
    "word", "Wörter", "слово", "単語", "🙂", "👩\u200d🚀", "…", "--", "{}", "();", "==", "0", "42", "٣",
    "İ", "ß", "ﬁ", "´", "”", "a", "B", "é", "e\u0301", "def f(x):", "  return x", "/usr/bin/env",
    '{"file_path": "a.py"}', "aaaaaaaaaaaa", "\ufeff", "\U0010ffff",
]  # fmt: skip


def fuzzed(n_texts, seed=7):
    rng = random.Random(seed)
    texts = ["", " ", "\n\n", "-", "a", "🙂", "é"]
    while len(texts) < n_texts:
        kind = rng.random()
        if kind < 0.6:
            texts.append("".join(rng.choices(PIECES, k=rng.randrange(1, 14))))
        elif kind < 0.8:
            texts.append("".join(rng.choices(string.printable, k=rng.randrange(1, 60))))
        else:
            points = (rng.randrange(1, 0xD800) for _ in range(rng.randrange(1, 20)))
            texts.append("".join(map(chr, points)))
    return texts


def stock_stats(name, texts, **arguments):
    (operator,) = data_juicer.build_operators(
        [{name: {"text_key": "chosen", **arguments}}], where="t"
    )
    return stock.filter_rows(operator, {"chosen": list(texts)})


def assert_equal_decisions(texts):
    column = pa.array(texts, pa.string())
    stats = text_stats(column, SPECIAL)
    kept, rows = stock_stats("text_length_filter", texts, min_len=3, max_len=40)
    assert stats.n_chars.tolist() == [row["text_len"] for row in rows]
    assert kept == [3 <= n <= 40 for n in stats.n_chars]
    _, rows = stock_stats("words_num_filter", texts)
    assert stats.n_words.tolist() == [row["num_words"] for row in rows]
    _, rows = stock_stats("special_characters_filter", texts)
    assert stats.special_ratio.tolist() == [row["special_char_ratio"] for row in rows]
    _, rows = stock_stats("character_repetition_filter", texts, rep_len=5)
    assert [repetition_ratio(t, 5) for t in texts] == [row["char_rep_ratio"] for row in rows]
    for arguments in (
        {"lowercase": True, "ignore_non_character": True},
        {"lowercase": True, "ignore_non_character": False},
        {"lowercase": False, "ignore_non_character": True},
        {"lowercase": False, "ignore_non_character": False},
    ):
        assert groups(text_digests(column, **arguments)) == groups(stock_hashes(texts, **arguments))


def stock_hashes(texts, **arguments):
    (operator,) = data_juicer.build_operators([{"document_deduplicator": arguments}], where="t")
    return [operator._compute_hash({"text": text})["__dj__hash"] for text in texts]


def groups(keys):
    """Number of the first row with the same key, per row."""
    first = {}
    return [first.setdefault(key, row) for row, key in enumerate(keys)]


def test_no_decision_differs_from_the_stock_operators():
    assert_equal_decisions(fuzzed(3000))


@pytest.mark.slow
def test_no_decision_differs_on_100_000_texts():
    assert_equal_decisions(fuzzed(100_000, seed=11))


def test_slices_and_nulls_are_read_right():
    column = pa.array(["skipped", "two words", None, "ünï", ""], pa.string()).slice(1)
    stats = text_stats(column, SPECIAL)
    assert stats.n_chars.tolist() == [9, 0, 3, 0]
    assert stats.n_words.tolist() == [2, 0, 1, 0]


def test_an_empty_column_has_no_statistics():
    stats = text_stats(pa.array([], pa.string()), SPECIAL)
    assert len(stats.n_chars) == len(stats.special_ratio) == 0
