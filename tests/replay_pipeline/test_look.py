"""`look`: what the table and the page hold, read without a browser."""

import json
import re
from collections import Counter
from datetime import date
from pathlib import Path

import pytest
from typer.testing import CliRunner

from replay_pipeline.cli import app
from replay_pipeline.errors import ConfigError, IngestError
from replay_pipeline.ingesters import ingest
from replay_pipeline.stages.pages.costs import list_price_usd
from replay_pipeline.stages.pages.files import page_folder
from replay_pipeline.stages.pages.look import Days, look
from replay_pipeline.stages.pages.tree import MAX_CHARS
from replay_pipeline.testing.sample import SESSIONS_DIR
from tests.replay_pipeline.ingesters.logs import Log
from tests.support.pages import data_of, turns_of

ATTACK = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(1)>"
SECRET = "ghp_" + "k3vR8tQz1LmN5pXw7YbC2dFg4HjS6aUe9TiO"


def session_log(folder: Path, said: str, answer: str) -> Path:
    log = Log("s", cwd="/home/ann/shop")
    log.user(said)
    usage = {"input_tokens": 1_000_000, "output_tokens": 100_000}
    log.says("m1", answer, message={"model": "claude-sonnet-4-5-20250929", "usage": usage})
    return log.write(folder)


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    page = tmp_path_factory.mktemp("look") / "look"
    return look([SESSIONS_DIR], to=page), page


def test_every_session_turn_and_decision_that_was_read_is_in_the_page(sample):
    figures, page = sample
    read = ingest([SESSIONS_DIR])
    data = data_of(page)
    shown = [turn for n in range(len(data["sessions"])) for turn in turns_of(data, n)]
    ids = [each["id"] for each in data["sessions"]]
    assert sorted(ids) == sorted(read.sessions["session_id"].to_pylist())
    assert len(shown) == len(read.turns)
    decisions = [turn["state"]["state_id"] for turn in shown if "state" in turn]
    assert sorted(decisions) == sorted(read.states["state_id"].to_pylist())
    tools = {part[1] for turn in shown for part in turn["parts"] if part[0] == "call"}
    assert tools == set(figures["tools"])
    whos = [[part[0] for part in turn["parts"]] for turn in shown if "state" in turn]
    assert not [each for each in whos if "tool" in each and each[0] == "tool"]
    assert not [turn for turn in shown if "state" in turn and not turn["parts"]]
    assert figures["total"]["states"] == sum(figures["outcomes"].values()) == len(read.states)
    assert figures["redactions"] == read.report.redactions


def test_figures_of_days_sessions_projects_and_models_add_up_to_the_same(sample):
    figures, page = sample
    data = data_of(page)
    days = data["overview"]["days"]
    usd = figures["cost_usd"]
    assert usd > 0
    assert sum(row[-1] or 0 for row in days) == pytest.approx(usd)
    assert sum(each["cost_usd"] for each in data["sessions"]) == pytest.approx(usd)
    assert sum(each["cost_usd"] for each in figures["projects"]) == pytest.approx(usd)
    assert sum(sum(row[3:-1]) for row in days) == sum(figures["tokens"].values())
    total = figures["total"]
    assert sum(each["n_errors"] for each in data["sessions"]) == total["errors"] > 0
    assert sum(each["n_interrupted"] for each in data["sessions"]) == total["interruptions"] > 0


def test_what_sessions_spent_by_day_and_model_is_what_the_days_cost(sample):
    data = data_of(sample[1])
    spent = Counter()
    for each in data["sessions"]:
        for day, model, usd in each["spent"]:
            spent[day, model, each["project"]] += usd
    days = {tuple(row[:3]): row[-1] for row in data["overview"]["days"] if row[-1]}
    assert +spent == pytest.approx(days)
    usd = [each["cost_usd"] for each in sample[0]["models"]]
    assert usd == sorted(usd, reverse=True)


def test_days_are_those_of_the_time_zone_and_only_those_asked_for(tmp_path):
    log = Log("one")
    usage = {"input_tokens": 100_000, "output_tokens": 10_000}
    log.user("Go.", timestamp="2026-01-01T22:00:00.000Z")
    for n, hour in enumerate(("01T22:30", "01T23:30", "03T12:00")):
        log.says(
            f"m{n}", "Yes.", timestamp=f"2026-01-{hour}:00.000Z",
            message={"model": "claude-opus-5", "usage": usage},
        )  # fmt: skip
        log.user("On.", timestamp=f"2026-01-{hour}:30.000Z")
    log.row("cost-state", uuid=None, modelUsage={"claude-opus-5": {"costUSD": 5.0}})
    path = log.write(tmp_path)

    def days(**asked):
        found = look([path], to=tmp_path / "look", days=Days(**asked))
        return {row[0]: row[-1] for row in found["days"]}, found["cost_usd"]

    assert days(timezone="UTC") == ({"2026-01-01": 1.5, "2026-01-03": pytest.approx(3.5)}, 5.0)
    by_day, _ = days(timezone="Europe/Berlin")
    assert list(by_day) == ["2026-01-01", "2026-01-02", "2026-01-03"]
    assert data_of(tmp_path / "look")["sessions"][0]["first"] == "2026-01-01T23:00:00+01:00"
    second = {"since": date(2026, 1, 2), "until": date(2026, 1, 2)}
    # What the client counted is of all days, so that none of it is told of one.
    assert days(timezone="Europe/Berlin", **second) == ({"2026-01-02": 0.75}, 0.75)
    with pytest.raises(IngestError, match="2026-01-02"):
        days(timezone="UTC", **second)
    with pytest.raises(ConfigError, match="Mars/Olympus"):
        days(timezone="Mars/Olympus")
    with pytest.raises(ConfigError, match="swap"):
        days(since=date(2026, 1, 3), until=date(2026, 1, 2))


def test_worktrees_are_part_of_their_repository_and_repositories_have_names_of_their_own(tmp_path):
    folders = [
        "/src/shop", "/src/shop/.worktrees/a/fix", "/src/shop/.claude/worktrees/b",
        "/src/shop.worktrees/c", "/home/.cursor/worktrees/shop/d", "C:\\src\\app", "C:\\old\\app",
    ]  # fmt: skip
    for n, folder in enumerate(folders):
        log = Log(f"s{n}", cwd=folder)
        log.user(f"Go to {n}.")
        log.says(f"m{n}", "Yes.")
        log.write(tmp_path)
    look([tmp_path], to=tmp_path.parent / "look")
    sessions = data_of(tmp_path.parent / "look")["sessions"]
    found = {each["id"]: each["project"] for each in sessions}
    apps = {found.pop("s5"), found.pop("s6")}
    assert apps in ({"app", "old/app"}, {"app", "src/app"})
    assert set(found.values()) == {"shop"}


def test_rewinds_and_subagents_are_counted_and_subagents_name_their_session(sample):
    sessions = data_of(sample[1])["sessions"]
    ids = {each["id"] for each in sessions}
    assert sum(each["n_branches"] for each in sessions) > 0
    parents = [each["parent"] for each in sessions if each["parent"]]
    assert len(parents) == sample[0]["total"]["subagents"] == 2
    assert set(parents) <= ids


def test_a_session_is_called_what_the_log_calls_it_or_by_its_first_request(tmp_path):
    log = Log("one")
    log.user("<system-reminder>Be kind.</system-reminder>Mend the  gate\nof the garden.")
    log.says("m1", "Done.")
    path = log.write(tmp_path)
    look([path], to=tmp_path / "look")
    assert data_of(tmp_path / "look")["sessions"][0]["title"] == "Mend the gate of the garden."
    leaf = json.loads(path.read_text().splitlines()[-1])["uuid"]
    rows = [
        {"type": "summary", "summary": "Of another session", "leafUuid": "elsewhere"},
        {"type": "summary", "summary": "A gate, for ann@shop.example", "leafUuid": leaf},
    ]
    path.write_text(path.read_text() + "".join(json.dumps(row) + "\n" for row in rows))
    look([path], to=tmp_path / "look")
    (session,) = data_of(tmp_path / "look")["sessions"]
    assert session["title"].startswith("A gate, for <EMAIL:")
    for more, title in (({"type": "ai-title", "aiTitle": "Gate"}, "Gate"),
                        ({"type": "custom-title", "customTitle": "My gate"}, "My gate")):  # fmt: skip
        path.write_text(path.read_text() + json.dumps({**more, "sessionId": "one"}) + "\n")
        look([path], to=tmp_path / "look")
        assert data_of(tmp_path / "look")["sessions"][0]["title"] == title


@pytest.mark.parametrize(
    ("said", "title"),
    [
        (["/clear", "/review 12 of ours", "Go."], "/review 12 of ours"),
        (["9", "Mend the gate."], "Mend the gate."),
        (["Tool loaded.", "Mend the gate."], "Mend the gate."),
        (["/exit"], "/exit"),
    ],
)
def test_a_session_is_called_by_what_was_asked_for(said: list[str], title: str, tmp_path: Path):
    log = Log("one")
    for n, text in enumerate(said):
        name, _, words = text.partition(" ")
        command = f"<command-name>{name}</command-name>\n <command-message>x</command-message>\n"
        command += f" <command-args>{words}</command-args>"
        log.user(command if text.startswith("/") else text)
        log.says(f"m{n}", "Yes.")
    look([log.write(tmp_path)], to=tmp_path / "look")
    assert data_of(tmp_path / "look")["sessions"][0]["title"] == title


def test_colors_of_terminals_go_and_names_with_markup_are_no_tools(tmp_path):
    log = Log("one")
    log.user("Go to 東京タワーへ行く。 Ｆｕｌｌ")
    log.calls("m1", "t1", 'Task" > <parameter name="description', x="\x1b[31mFAIL\x1b[0m")
    look([log.write(tmp_path)], to=tmp_path / "look")
    data = data_of(tmp_path / "look")
    assert turns_of(data)[1]["parts"][0][2] == [["x", "FAIL"]]
    assert list(data["overview"]["tools"]) == ["(not a tool's name)"]
    assert {"東京タワーへ行く", "full"} <= set(data["words"])


def test_a_word_is_found_in_the_sessions_that_have_it_and_no_others(sample):
    data = data_of(sample[1])
    index = data["words"]
    texts = [
        json.dumps(turns_of(data, n), ensure_ascii=False).lower()
        for n in range(len(data["sessions"]))
    ]
    for word in ("pytest", "stacks", "def", "notice"):
        found = set(index[word])
        whole = re.compile(rf"(?<![^\W_]){word}(?![^\W_])")
        assert found <= {n for n, text in enumerate(texts) if word in text}
        assert found >= {
            n for n, text in enumerate(texts) if whole.search(text.replace("\\n", " "))
        }


def test_text_of_sessions_is_inert_and_secrets_are_taken_out(tmp_path):
    log = session_log(tmp_path, f"{ATTACK} the token is {SECRET}", "\x1b[31m" + ATTACK)
    page = tmp_path / "look"
    figures = look([log], to=page)
    html = (page / "index.html").read_text("utf-8")
    assert html.count("<script") == html.count("</script>") == 1
    assert "default-src 'none'" in html
    assert "unsafe" not in html.partition("<title>")[0]
    assert "<script>alert" not in html
    assert "<img" not in html
    turns = turns_of(data_of(page))
    assert SECRET not in json.dumps(turns)
    assert [ATTACK in turn["parts"][0][1] for turn in turns] == [True, True]
    assert "\x1b" not in turns[1]["parts"][0][1]
    assert sum(figures["redactions"].values()) >= 1
    for path in page.rglob("*"):
        text = path.read_bytes() if path.is_file() else b""
        assert b"<script>alert" not in text
        assert SECRET.encode() not in text


def test_a_folder_with_other_files_is_left_alone_and_old_data_go(tmp_path):
    log = session_log(tmp_path, "Go.", "Yes.")
    other = tmp_path / "mine"
    other.mkdir()
    (other / "thesis.txt").write_text("all of it")
    with pytest.raises(ConfigError, match="--to"):
        look([log], to=other)
    with pytest.raises(ConfigError, match="--to"):
        look([log], to=other / "thesis.txt")
    assert [p.name for p in other.iterdir()] == ["thesis.txt"]
    look([SESSIONS_DIR], to=tmp_path / "look")
    look([log], to=tmp_path / "look")
    assert [name for name in data_of(tmp_path / "look") if name.startswith("session-")] == [
        "session-0"
    ]


def test_a_page_whose_making_was_cut_short_is_made_again(tmp_path):
    making = page_folder(tmp_path / "look")
    making.__enter__().add("overview", {"a": 1})
    assert (tmp_path / "look" / "data" / "overview.js").is_file()
    look([session_log(tmp_path, "Go.", "Yes.")], to=tmp_path / "look")
    assert (tmp_path / "look" / "index.html").is_file()


def test_a_long_text_is_cut_and_says_by_how_much(tmp_path):
    log = session_log(tmp_path, "word " * 2_000, "Yes.")
    look([log], to=tmp_path / "look")
    text = turns_of(data_of(tmp_path / "look"))[0]["parts"][0][1]
    assert text.endswith(f"… and {10_000 - MAX_CHARS:,} characters more")


def test_tokens_cost_what_the_list_says_and_a_model_without_a_price_is_named(tmp_path):
    figures = look([session_log(tmp_path, "Go.", "Yes.")], to=tmp_path / "look")
    assert figures["cost_usd"] == pytest.approx(1.0 * 6 + 0.1 * 22.5)  # a long prompt
    cached = {"cache_write": 1_000_000, "cache_read": 1_000_000}
    assert list_price_usd("claude-opus-4-5-20251101", cached) == pytest.approx(5 * 1.25 + 5 * 0.1)
    assert list_price_usd("claude-opus-4-20250514", {"input": 1_000_000}) == pytest.approx(15.0)
    assert list_price_usd("some-model", {"input": 1}) is None


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
    figures = look([log.write(tmp_path)], to=tmp_path / "look")
    assert figures["cost_usd"] == pytest.approx(0.0122)
    assert figures["tokens"] == {
        "input": 50, "cache_write": 0, "cache_write_1h": 500, "cache_read": 15_000, "output": 250
    }  # fmt: skip


@pytest.mark.parametrize(
    ("model", "more", "usd"),
    [
        ("claude-opus-4-6", {"speed": "fast"}, 6 * 0.75),
        ("claude-opus-4-8", {"speed": "fast"}, 2 * 0.75),
        ("claude-opus-5", {"speed": "fast"}, 2 * 0.75),
        ("claude-opus-5", {"speed": "standard", "inference_geo": "us"}, 1.1 * 0.75),
        ("claude-opus-5", {"server_tool_use": {"web_search_requests": 10}}, 0.75 + 0.10),
        ("claude-sonnet-4-5", {"input_tokens": 300_000}, 1.8 + 1.5 * 0.15),
        ("claude-opus-4-6", {"input_tokens": 300_000}, 3.0 + 1.5 * 0.25),
        ("claude-opus-5", {"input_tokens": 300_000}, 1.75),
        ("us.anthropic.claude-opus-4-6-v1:0", {}, 0.75),
        ("global.anthropic.claude-sonnet-4-5-20250929-v1:0", {}, 0.45),
        ("claude-opus-4-5@20251101", {}, 0.75),
    ],
)
def test_speed_searches_region_length_and_cloud_are_in_the_price(
    model: str, more: dict, usd: float, tmp_path: Path
):
    log = Log("one")
    log.user("Go.")
    usage = {"input_tokens": 100_000, "output_tokens": 10_000} | more
    log.says("m1", "Yes.", message={"model": model, "usage": usage})
    figures = look([log.write(tmp_path)], to=tmp_path / "look")
    assert figures["cost_usd"] == pytest.approx(usd)
    assert figures["models_without_price"] == []


def test_what_has_no_price_says_so_unless_its_client_counted_it(tmp_path):
    log = Log("one", version="2.1.330")
    log.user("Go.")
    usage = {"input_tokens": 100_000, "output_tokens": 10_000, "speed": "fast"}
    log.says("m1", "Yes.", message={"model": "claude-opus-4-5", "usage": usage})
    figures = look([log.write(tmp_path)], to=tmp_path / "look")
    assert figures["models_without_price"] == ["claude-opus-4-5 (fast)"]
    counted = {"claude-opus-4-5": {"costUSD": 1.25}, "claude-haiku-5-5": {"costUSD": 0.25}}
    log.row("cost-state", uuid=None, modelUsage=counted)
    figures = look([log.write(tmp_path)], to=tmp_path / "look")
    assert figures["cost_usd"] == pytest.approx(1.5)
    assert figures["models_without_price"] == []


def test_a_conversation_costs_what_its_subagents_and_unlogged_calls_do(tmp_path):
    log, inner = Log("one"), Log("one", agentId="a1", isSidechain=True)
    log.user("Go.")
    usage = {"input_tokens": 100_000, "output_tokens": 10_000}
    message = {"model": "claude-opus-5", "usage": usage}
    log.says("m1", "Yes.", message=message)
    inner.user("Look.")
    inner.says("m2", "Seen.", message=message)
    log.write(tmp_path)
    inner.write(tmp_path, "one/subagents/agent-a1.jsonl")
    for counted, usd in ((None, 1.5), (1.2, 1.5), (2.0, 2.0)):
        if counted:
            uses = {"claude-opus-5": {"costUSD": counted}}
            log.row("cost-state", uuid=None, modelUsage=uses)
            log.write(tmp_path)
        figures = look([tmp_path], to=tmp_path.parent / "look")
        assert figures["cost_usd"] == pytest.approx(usd)
        main, sub = sorted(
            data_of(tmp_path.parent / "look")["sessions"], key=lambda s: s["cost_usd"]
        )[::-1]
        assert [main["total_usd"], sub["total_usd"]] == pytest.approx([usd, usd])
        assert main["cost_usd"] == pytest.approx(usd - 0.75)
        assert sum(p["cost_usd"] for p in figures["projects"]) == pytest.approx(usd)


def test_a_model_that_is_not_listed_gets_no_price_of_another(tmp_path):
    tokens = {"input": 1_000_000, "cache_read": 1_000_000}
    assert list_price_usd("anthropic/claude-opus-4-7[1m]", tokens) == pytest.approx(5 + 0.5)
    assert list_price_usd("claude-opus-5-5", tokens) == pytest.approx(4 + 0.2)
    assert list_price_usd("gpt-5-2025-08-07", tokens) == pytest.approx(1.25 + 0.125)
    for name in ("claude-opus-4-99", "gpt-5.99", "gpt-5-nano", "claude-haiku-5-5", None):
        assert list_price_usd(name, tokens) is None


def test_no_session_is_an_error_and_writes_no_page(tmp_path):
    with pytest.raises(IngestError):
        look([tmp_path / "none"], to=tmp_path / "look")
    assert not (tmp_path / "look" / "index.html").exists()


def test_the_command_needs_no_settings_and_says_where_the_page_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "settings.toml").write_text("not = [toml")
    log = session_log(tmp_path, "Go.", "Yes.")
    done = CliRunner().invoke(app, ["look", str(log)])
    assert done.exit_code == 0, done.output
    assert "open look/index.html in a browser" in done.output
    assert (tmp_path / "look" / "index.html").exists()
    assert "$8.25" in done.output
