"""Whether what is held out is held out, asked of the texts in the dataset."""

import json
import random
import shutil

import pyarrow.parquet as pq
import pytest

from replay_pipeline.errors import CheckFailedError
from replay_pipeline.ingesters import ClaudeCodeIngester
from replay_pipeline.publish import publish
from replay_pipeline.stages.audit.dataset import refuse_unfit_dataset
from replay_pipeline.stages.audit.held_out import shared_conversations, shared_messages
from replay_pipeline.testing.sample import SESSIONS_DIR
from tests.full_tables import full_table
from tests.replay_pipeline.publish.rows import kept_row
from tests.support.messages import call

LONG = "Find every caller of the parser and say which of its two results each of them reads. " * 3


def row(number, session, *messages, **others):
    prompt = json.dumps([{"role": "user", "content": text} for text in messages])
    return kept_row(number, session=session) | {"state_messages_json": prompt} | others


def published(folder, rows, *, fraction=0.5):
    publish(
        [("b", full_table(rows, "normalized_pairs"))],
        folder=folder,
        test_fraction=fraction,
        lengths=[],
    )
    return folder


def test_a_conversation_on_both_sides_is_named(tmp_path):
    folder = published(tmp_path, [row(n, f"s{n}", f"Request {n}.") for n in range(6)])
    shard = next((folder / "data" / "pairs" / "train").rglob("*.parquet"))
    shutil.copy(shard, folder / "data" / "pairs" / "test" / "b")
    assert shared_conversations(folder).facts["shared_conversations"] > 0
    with pytest.raises(CheckFailedError, match="is in both splits"):
        refuse_unfit_dataset(folder)


def cut_in_two():
    """Sessions that hand out a task, and their subagents: by the hash of their ids on both sides."""
    handed_out = [
        {"role": "user", "content": "Where is the parser called?"},
        call("Task", prompt=LONG),
        {"role": "tool", "tool_call_id": "call_1", "content": "Here."},
    ]
    for number in range(2):
        asks = kept_row(10 * number, session=f"s{number}")
        yield asks | {"state_messages_json": json.dumps(handed_out)}
        yield row(10 * number + 1, f"s{number}.agent-a{number}", LONG)


def test_without_conversations_the_check_by_content_sees_what_the_check_by_name_does_not(tmp_path):
    """Each session as a conversation of its own is how versions before layout 3 split."""
    rows = list(cut_in_two())
    by_session = [each | {"conversation": each["session_id"]} for each in rows]
    sides = published(tmp_path / "by session", by_session)
    assert shared_conversations(sides).holds
    assert not shared_messages(sides).holds
    together = [each | {"conversation": "one"} for each in rows]
    assert shared_messages(published(tmp_path / "one", together)).holds
    with pytest.raises(CheckFailedError, match="splits_share_no_prompt: a message of 254 char"):
        refuse_unfit_dataset(sides)


@pytest.fixture(scope="module")
def sample_states():
    """What the sample's sessions are: subagents, a fork and a resumed one among them."""
    return list(ClaudeCodeIngester().ingest(SESSIONS_DIR))


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "fraction"), [(1, 0.0), (2, 0.1), (3, 0.5)])
def test_of_sessions_with_subagents_resumes_and_forks_no_conversation_is_on_both_sides(
    sample_states, seed, fraction, tmp_path
):
    """Under other names, drawn by chance: the hash of a name decides its side."""
    drawn = random.Random(seed)
    of_session = {state["session_id"]: state["conversation"] for state in sample_states}
    names = {each: f"{drawn.getrandbits(128):032x}" for each in sorted({*of_session.values()})}
    rows = [
        row(number, session, f"Request {number}.") | {"conversation": names[conversation]}
        for number, (session, conversation) in enumerate(of_session.items())
    ]
    folder = published(tmp_path / "set", rows, fraction=fraction)
    verdict = shared_conversations(folder)
    assert verdict.holds
    sides = {}
    for path in folder.rglob("*.parquet"):
        for each in pq.ParquetFile(path).read(["conversation"])["conversation"].to_pylist():
            sides.setdefault(each, set()).add(path.relative_to(folder).parts[2])
    assert {*sides} == {*names.values()}
    assert all(len(each) == 1 for each in sides.values())
    assert (set().union(*sides.values()) == {"train"}) == (not fraction)


@pytest.mark.parametrize("number", [3, 4])
def test_what_stands_in_more_than_three_conversations_is_no_leak(number, tmp_path):
    rows = [row(n, f"session {n}", f"Request {n}.", LONG) for n in range(number)]
    # Side by side, requests and what follows them are joined into one message by the pipeline.
    verdict = shared_messages(published(tmp_path / "set", rows))
    assert verdict.holds == (number == 4)


def test_copies_of_one_history_count_as_one_conversation_whatever_they_are_called(tmp_path):
    rows = [row(n, f"copy {n}", "Begin.", LONG) for n in range(9)]
    assert not shared_messages(published(tmp_path / "set", rows)).holds


def test_a_message_within_another_is_found(tmp_path):
    rows = [row(n, f"session {n}", f"{n}: remember.\n\n{LONG}\n\nAnd {n}.") for n in range(2)]
    rows.append(row(3, "session 3", LONG))
    verdict = shared_messages(published(tmp_path / "set", rows))
    assert not verdict.holds


@pytest.mark.parametrize(
    "text",
    [
        LONG[:190],
        f"Base directory for this skill: /skills/x\n\n{LONG}",
        f"<system-reminder>{LONG}</system-reminder>\n\nGo on.",
    ],
)
def test_short_messages_and_what_the_client_writes_may_be_shared(text, tmp_path):
    rows = [row(n, f"session {n}", text) for n in range(3)]
    assert shared_messages(published(tmp_path / "set", rows)).holds


def test_a_leak_keeps_the_old_version(tmp_path):
    folder = published(tmp_path / "set", [row(0, "session 0", "One request.")])
    before = sorted(path.name for path in folder.rglob("*.parquet"))
    rows = [row(n, f"session {n}", LONG) for n in range(2)]
    with pytest.raises(CheckFailedError):
        publish(
            [("b2", full_table(rows, "normalized_pairs"))],
            folder=folder,
            test_fraction=0.5,
            lengths=[],
            look=refuse_unfit_dataset,
        )
    assert sorted(path.name for path in folder.rglob("*.parquet")) == before
