"""`look`: what the table and the page hold, read without a browser."""

import base64
import gzip
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from replay_pipeline.cli import app
from replay_pipeline.errors import IngestError
from replay_pipeline.ingesters import ingest
from replay_pipeline.look import look
from replay_pipeline.look.look import MAX_CHARS
from replay_pipeline.look.overview import cost_usd
from replay_pipeline.review import write_review
from replay_pipeline.testing.sample import SESSIONS_DIR
from tests.replay_pipeline.ingesters.logs import Log

ATTACK = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(1)>"
SECRET = "ghp_" + "k3vR8tQz1LmN5pXw7YbC2dFg4HjS6aUe9TiO"


def data_of(page: Path) -> dict:
    (text,) = re.findall(r'id="data">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    return json.loads(text)


def turns_of(data: dict, number: int) -> list[dict]:
    return json.loads(gzip.decompress(base64.b64decode(data["pieces"][number])))


def session_log(folder: Path, said: str, answer: str) -> Path:
    def row(kind, uuid, parent, message):
        return {
            "type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "s", "version": "2.1.0",
            "cwd": "/home/ann/shop", "timestamp": "2026-01-01T00:00:00.000Z", "isSidechain": False,
            "userType": "external", "message": message,
        }  # fmt: skip

    usage = {"input_tokens": 1_000_000, "output_tokens": 100_000}
    rows = [
        row("user", "u1", None, {"role": "user", "content": said}),
        row("assistant", "a1", "u1", {
            "id": "m1", "type": "message", "role": "assistant", "model": "claude-sonnet-4-5-20250929",
            "content": [{"type": "text", "text": answer}], "stop_reason": "end_turn", "usage": usage,
        }),
    ]  # fmt: skip
    path = folder / "s.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    page = tmp_path_factory.mktemp("look") / "look.html"
    return look([SESSIONS_DIR], page=page), page


def test_every_session_turn_and_decision_that_was_read_is_in_the_page(sample):
    figures, page = sample
    read = ingest([SESSIONS_DIR])
    data = data_of(page)
    shown = [turn for n in range(len(data["pieces"])) for turn in turns_of(data, n)]
    ids = [each["id"] for each in data["sessions"]]
    assert sorted(ids) == sorted(read.sessions["session_id"].to_pylist())
    assert len(shown) == len(read.turns)
    decisions = [turn["state"]["state_id"] for turn in shown if "state" in turn]
    assert sorted(decisions) == sorted(read.states["state_id"].to_pylist())
    tools = {who for turn in shown for who, _ in turn["parts"] if who.startswith("call: ")}
    assert tools == {f"call: {name}" for name in figures["tools"]}
    whos = [[who for who, _ in turn["parts"]] for turn in shown if "state" in turn]
    assert not [each for each in whos if "tool" in each and each[0] == "tool"]
    assert not [turn for turn in shown if "state" in turn and not turn["parts"]]
    assert figures["total"]["states"] == sum(figures["outcomes"].values()) == len(read.states)
    assert figures["tokens"]["output"] == read.report.usage["output_tokens"]
    assert figures["redactions"] == read.report.redactions


def test_rewinds_and_subagents_are_counted_and_subagents_name_their_session(sample):
    sessions = data_of(sample[1])["sessions"]
    ids = {each["id"] for each in sessions}
    assert sum(each["n_branches"] for each in sessions) > 0
    parents = [each["parent"] for each in sessions if each["parent"]]
    assert len(parents) == sample[0]["total"]["subagents"] == 2
    assert set(parents) <= ids


def test_the_same_sessions_make_the_same_page(sample, tmp_path):
    look([SESSIONS_DIR], page=tmp_path / "again.html")
    assert (tmp_path / "again.html").read_bytes() == sample[1].read_bytes()


def test_text_of_sessions_is_inert_and_secrets_are_taken_out(tmp_path):
    session_log(tmp_path, f"{ATTACK} the token is {SECRET}", "\x1b[31m" + ATTACK)
    page = tmp_path / "look.html"
    figures = look([tmp_path], page=page)
    html = page.read_text("utf-8")
    assert html.count("<script") == html.count("</script>") == 2
    assert "default-src 'none'" in html
    assert "alert(1)" not in html
    (turns,) = [turns_of(data_of(page), 0)]
    assert SECRET not in json.dumps(turns)
    assert [ATTACK in turn["parts"][0][1] for turn in turns] == [True, True]
    assert "\x1b" not in turns[1]["parts"][0][1]
    assert sum(figures["redactions"].values()) >= 1


def test_a_long_text_is_cut_and_says_by_how_much(tmp_path):
    session_log(tmp_path, "word " * 2_000, "Yes.")
    page = tmp_path / "look.html"
    look([tmp_path], page=page)
    text = turns_of(data_of(page), 0)[0]["parts"][0][1]
    assert text.endswith(f"… and {10_000 - MAX_CHARS:,} characters more")


def test_tokens_cost_what_the_list_says_and_a_model_without_a_price_is_named(tmp_path):
    session_log(tmp_path, "Go.", "Yes.")
    figures = look([tmp_path], page=tmp_path / "look.html")
    assert figures["cost_usd"] == pytest.approx(1.0 * 3 + 0.1 * 15)
    cached = {"cache_write": 1_000_000, "cache_read": 1_000_000}
    assert cost_usd("claude-opus-4-5-20251101", cached) == pytest.approx(5 * 1.25 + 5 * 0.1)
    assert cost_usd("claude-opus-4-20250514", {"input": 1_000_000}) == pytest.approx(15.0)
    assert cost_usd("some-model", {"input": 1}) is None


def test_what_is_written_to_the_cache_for_an_hour_costs_what_the_client_counts(tmp_path):
    """The client's own count of such a session, in its row `cost-state`: 0.0122 dollars."""
    log = Log("one", version="2.1.330")
    log.user("Go.")
    usage = {
        "input_tokens": 50,
        "output_tokens": 250,
        "cache_read_input_tokens": 15_000,
        "cache_creation_input_tokens": 500,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 500},
    }
    log.says("m1", "Yes.", message={"model": "claude-opus-5-5", "usage": usage})
    figures = look([log.write(tmp_path)], page=tmp_path / "look.html")
    assert figures["cost_usd"] == pytest.approx(0.0122)
    assert figures["tokens"] == {
        "input": 50, "cache_write": 0, "cache_write_1h": 500, "cache_read": 15_000, "output": 250
    }  # fmt: skip


def test_a_model_that_is_not_listed_gets_no_price_of_another(tmp_path):
    tokens = {"input": 1_000_000, "cache_read": 1_000_000}
    assert cost_usd("anthropic/claude-opus-4-7[1m]", tokens) == pytest.approx(5 + 0.5)
    assert cost_usd("claude-opus-5-5", tokens) == pytest.approx(4 + 0.2)
    assert cost_usd("gpt-5-2025-08-07", tokens) == pytest.approx(1.25 + 0.125)
    for name in ("claude-opus-4-99", "gpt-5.99", "gpt-5-nano", "claude-haiku-5-5", None):
        assert cost_usd(name, tokens) is None


def test_both_pages_have_the_same_colours_and_lead_to_each_other(tmp_path):
    session_log(tmp_path, "Go.", "Yes.")
    page, review = tmp_path / "a b" / "look.html", tmp_path / "data" / "review.html"
    page.parent.mkdir()
    look([tmp_path / "s.jsonl"], page=page, review=review)
    assert data_of(page)["review"] == "../data/review.html"
    write_review([], path=review, look=page)
    assert data_of(review)["look"] == "../a%20b/look.html"
    palette = [
        html.read_text("utf-8").partition(":root {")[2].partition("}")[0] for html in (page, review)
    ]
    assert palette[0] == palette[1] != ""
    look([tmp_path / "s.jsonl"], page=page)
    assert data_of(page)["review"] is None


def test_no_session_is_an_error_and_writes_no_page(tmp_path):
    with pytest.raises(IngestError):
        look([tmp_path / "none"], page=tmp_path / "look.html")
    assert not (tmp_path / "look.html").exists()


def test_the_command_needs_no_settings_and_says_where_the_page_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "settings.toml").write_text("not = [toml")
    log = session_log(tmp_path, "Go.", "Yes.")
    done = CliRunner().invoke(app, ["look", str(log)])
    assert done.exit_code == 0, done.output
    assert "look.html" in done.output
    assert "$4.50" in done.output
