"""What a cut leaves of a prompt: everything that a side needs, or no row at all."""

import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replay_pipeline.actions import canonical_action
from replay_pipeline.actions.windows import OMITTED
from replay_pipeline.judge.feasibility import PromptState
from replay_pipeline.publish import layout, publish
from replay_pipeline.publish.lengths import TokenSizes, cut_pairs, measured
from tests.replay_pipeline.publish.rows import kept_row, kept_table
from tests.support.messages import call

SYSTEM = {"role": "system", "content": "You are an agent.\nWorking directory: /w\n"}
REQUEST = {"role": "user", "content": "Fix the cart."}
CODE = "".join(f"{n:>6}→line_number_{n} = {n}\n" for n in range(1, 400))
SIZES = TokenSizes()


def answer(text):
    return {"role": "tool", "tool_call_id": "call_1", "content": text}


def noise(n, words=400):
    for number in range(n):
        yield call("Grep", pattern=f"step {number}")
        yield answer(f"{number} {'word ' * words}")


def tool(name, n_words=10):
    return {"type": "function", "function": {"name": name, "description": "word " * n_words}}


def edit(old="line_number_200 = 200", path="cart.py"):
    return call("Edit", file_path=path, old_string=old, new_string="x = 1")


def table(messages, chosen, rejected=None, tools=()):
    sides = {"chosen": [chosen], "rejected": [rejected or call("Glob", pattern="*")]}
    row = {name: [layout.message_of(one) for one in messages] for name, messages in sides.items()}
    prompt = [layout.message_of(one) for one in [SYSTEM, REQUEST, *messages]]
    row |= {"prompt": prompt, "tools": json.dumps(list(tools)) if tools else None}
    return measured(pa.Table.from_pylist([row], schema=layout.PAIRS), SIZES)


def cut(pairs, n_tokens):
    """The row that is left, or why there is none."""
    reasons = Counter()
    rows = cut_pairs(pairs, n_tokens, SIZES, reasons).to_pylist()
    assert len(rows) + reasons.total() == 1
    if not rows:
        return next(iter(reasons))
    (row,) = rows
    assert row["n_tokens"] == SIZES.whole(row) <= n_tokens
    return row


def is_possible(row, side="chosen"):
    return PromptState(row["prompt"]).impossible(canonical_action(row[side][0])) is None


READ = [call("Read", file_path="/w/cart.py"), answer(CODE)]


def test_the_text_that_an_edit_replaces_stays_however_early_it_was_shown():
    pairs = table([*noise(3), *READ, *noise(30)], edit())
    assert pairs["needs"].to_pylist() == [[8, 9]]
    row = cut(pairs, 16_384)
    assert is_possible(row)
    contents = [message["content"] for message in row["prompt"]]
    assert contents[0] == SYSTEM["content"]
    assert contents[1] == f"{REQUEST['content']}\n\n{OMITTED}"
    assert contents[3] == CODE
    assert contents[4] == OMITTED
    assert contents[-1].startswith("29 word")
    assert row["needs"] == [2, 3]


def test_as_much_as_fits_stays_and_the_oldest_goes_first():
    pairs = table([*noise(60)], call("Glob", pattern="*.py"))
    row = cut(pairs, 8_192)
    kept = [m["content"].split()[0] for m in row["prompt"] if m["role"] == "tool"]
    assert kept == [str(n) for n in range(60 - len(kept), 60)]
    assert row["n_tokens"] > 0.85 * 8_192


def test_of_a_long_result_the_lines_around_what_is_replaced_stay():
    pairs = table([*READ, *noise(30)], edit())
    row = cut(pairs, 2_048)
    assert is_possible(row)
    result = row["prompt"][3]["content"]
    assert "line_number_199 = 199" in result
    assert "line_number_50 = 50" not in result
    assert "lines left out]" in result


def test_later_changes_of_the_file_stay_with_what_was_shown():
    change = [edit("line_number_7 = 7"), answer("The file has been updated.")]
    pairs = table([*READ, *noise(20), *change, *noise(20)], edit())
    row = cut(pairs, 8_192)
    assert any("line_number_7 = 7" in json.dumps(m["tool_calls"]) for m in row["prompt"])


def test_the_recorded_side_counts_as_much_as_the_chosen_one():
    pairs = table([*READ, *noise(30)], call("Glob", pattern="*"), edit())
    assert is_possible(cut(pairs, 8_192), "rejected")


def test_the_users_last_request_stays_whole():
    last = {"role": "user", "content": "And now " + "please " * 600}
    pairs = table([*noise(10), last, *noise(20)], call("Glob", pattern="*"))
    row = cut(pairs, 4_096)
    assert any(last["content"] in message["content"] for message in row["prompt"])


def test_a_request_stays_where_a_side_commits():
    asked = {"role": "user", "content": "Commit it when you are done."}
    pairs = table(
        [*noise(5), asked, *noise(5), {"role": "user", "content": "Go on."}, *noise(20)],
        call("Bash", command="git commit -am x"),
    )
    row = cut(pairs, 8_192)
    assert any(asked["content"] in message["content"] for message in row["prompt"])


def test_tools_that_nothing_uses_go_before_any_step():
    tools = [tool("Grep"), tool("Glob"), tool("Edit"), tool("Browser", 17_000)]
    pairs = table([*READ, *noise(5)], edit(), tools=tools)
    row = cut(pairs, 16_384)
    assert [layout.tool_name(one) for one in json.loads(row["tools"])] == ["Grep", "Glob", "Edit"]
    assert len(row["prompt"]) == 2 + 2 + 10
    whole = cut(pairs, 65_536)
    assert whole["tools"] == pairs["tools"][0].as_py()


@pytest.mark.parametrize(
    ("messages", "chosen", "reason"),
    [
        ([*noise(1)], call("Write", file_path="x", content="word " * 3_000), "the tools and a side alone"),
        ([call("Write", file_path="/w/cart.py", content="word " * 1_500 + "\nline_number_200 = 200"), answer("Done."), *noise(2)], edit(), "what the sides need alone"),
    ],
)  # fmt: skip
def test_a_pair_that_cannot_be_kept_is_left_out_with_its_reason(messages, chosen, reason):
    assert cut(table(messages, chosen), 1_024) == reason


def test_an_estimate_is_rather_too_high():
    """Against what two real tokenizers count of these texts, SmolLM2's and DeepSeek's."""
    for text, n_tokens in (
        ("The cart total ignores the discount when two coupons apply.", 12),
        ("    for item in self.items:\n        total += item.price * item.count\n", 19),
        ('{"file_path":"/home/ada/shop/cart.py","offset":120,"limit":40}', 27),
        ("2025-11-03 14:22:07,118 ERROR worker[1123] timeout after 3000 ms", 41),
        ("価格の合計が正しくありません。", 27),
    ):
        assert n_tokens <= SIZES._of_text(text) <= 1.6 * n_tokens, text


def test_pairs_with_needs_are_published_and_read_back(tmp_path):
    messages = json.dumps([REQUEST, *READ])
    rows = [
        kept_row(n, state_messages_json=messages, chosen_messages_json=json.dumps([edit()]))
        for n in range(3)
    ]
    publish([("b", kept_table(*rows))], folder=tmp_path / "set")
    read = pq.read_table(tmp_path / "set" / "data" / "pairs", partitioning=None)
    assert read["needs"].to_pylist() == [[1, 2]] * 3
