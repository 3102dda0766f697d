"""A verdict over the wire: models that are planted as equal, worse, and unfit, on the sample's decisions."""

import json
import random
import re

import pytest
from typer.testing import CliRunner

from replay_pipeline.cli import app
from replay_pipeline.errors import ConfigError, PriceError
from replay_pipeline.ingesters import ClaudeCodeIngester
from replay_pipeline.replay import openrouter_name
from replay_pipeline.settings import Settings
from replay_pipeline.stages.budget.verdict import cohort_of, instructed, models_of
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.testing.sample import SESSIONS_DIR
from replay_pipeline.types import TeacherSpec
from tests.support.messages import bash, says
from tests.support.odd_server import OddServer
from tests.support.sessions import SessionBuilder, ToolCall
from tests.support.settings_files import write_settings
from tests.support.teachers import TeacherServer

pytestmark = pytest.mark.slow

SHARES = {
    "deepseek/deepseek-v4-pro": 0.8,
    "qwen/qwen3-coder": 0.8,
    "z-ai/glm-4.6": 0.8,
    "moonshotai/equal": 1.0,
    "mistralai/worse": 0.2,
    "mistralai/other": 0.9,
}
"""How often each model does what the agent did, which is right here: so the panel is weaker than the agent."""
TALKS = says("You may want to look at the tests.")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    rng, answers = random.Random(1), {}
    for state in ClaudeCodeIngester().ingest(SESSIONS_DIR):
        own = {key: value for key, value in state["student_action"].items() if key != "reasoning"}
        answers[state["state_id"]] = {
            name: own if rng.random() < share else bash(f"make step-{rng.randrange(10**6)}")
            for name, share in SHARES.items()
        } | {"meta-llama/talker": TALKS, openrouter_name(state["student_model"]): own}
    data = tmp_path_factory.mktemp("verdict") / "d"
    with TeacherServer(answers) as server:
        reached = {"base_url": server.base_url, "api_key_env": None, "dialect": "openrouter"}
        names = list(SHARES)[:3]
        write_settings(
            data,
            ingest={"sources": [SESSIONS_DIR]},
            replay={
                "ask_at": "consequences",
                "teachers": [
                    TeacherSpec(name=name.split("/")[0], model=name, **reached) for name in names
                ],
                "student": TeacherSpec(name="student", model="student", **reached),
            },
        )
        Pipeline(Settings.load(data_dir=data)).ingest_new()
        yield data


def ask(root, model, *more):
    given = ["verdict", model, "--data", str(root), "--json", *more]
    found = CliRunner().invoke(app, given)
    if isinstance(found.exception, ConfigError):
        raise found.exception
    report = json.loads(found.stdout) if found.stdout.startswith("{") else None
    return found, report


def test_an_equal_model_could_a_worse_one_and_one_that_only_talks_could_not(root):
    found, equal = ask(root, "moonshotai/equal")
    assert (found.exit_code, equal["answer"]) == (0, "could"), found.output
    assert "moonshotai/equal could have done your work for $" in equal["words"]
    assert "as many of 100 decisions right as claude-sonnet" in equal["words"]
    assert "per 100 decisions" in equal["words"]
    found, worse = ask(root, "mistralai/worse")
    assert (found.exit_code, worse["answer"]) == (3, "could not")
    assert worse["high"] < equal["low"] or worse["difference"] < equal["difference"] - 0.3
    found, talker = ask(root, "meta-llama/talker")
    assert found.exit_code == 3
    assert "only spoke" in talker["words"]
    # The same decisions for each, and the agent differs from itself in nothing here.
    assert len({each["cohort"] for each in (equal, worse, talker)}) == 1
    assert "Keep claude-sonnet" in talker["words"]
    assert equal["again"]["difference"] == 0


def test_what_was_paid_is_not_paid_again_and_no_budget_is_passed(root):
    _, again = ask(root, "moonshotai/equal")
    assert again["spent_usd"] == 0
    found, poor = ask(root, "mistralai/other", "--budget", "0.05")
    assert (found.exit_code, poor["answer"]) == (4, "can't tell")
    assert 0 < poor["spent_usd"] <= 0.05
    assert "the money was spent" in poor["ended"]


def test_a_cohort_has_whole_runs_of_consecutive_decisions_and_the_others_follow(root):
    project = Pipeline(Settings.load(data_dir=root))
    agent, drawn, rest = cohort_of(project, than=None, cohort="runs", n_decisions=60)
    again = cohort_of(project, than=agent, cohort="runs", n_decisions=150)
    assert again == (agent, drawn, rest)  # the size is that of the first time
    assert 40 <= sum(map(len, drawn)) <= 80
    for run in (*drawn, *rest):
        assert len({place.session_id for place in run}) == 1
        assert [place.number for place in run] == sorted(place.number for place in run)
    runs = [run[0].run for run in (*drawn, *rest)]
    assert len(runs) == len(set(runs))  # none is torn


def test_a_cohort_is_of_one_agent_and_a_panel_needs_two_other_makers(root):
    with pytest.raises(ConfigError, match="no decision of nobody"):
        ask(root, "moonshotai/equal", "--than", "nobody", "--cohort", "new")
    with pytest.raises(ConfigError, match="--cohort"):
        ask(root, "moonshotai/equal", "--than", "nobody")
    with pytest.raises(ConfigError, match="two teachers of other makers"):
        models_of(Pipeline(Settings.load(data_dir=root)), (), "qwen", "claude-sonnet-4-5")


def test_a_price_and_public_scores_are_told_for_free(root):
    found, cost = ask(root, "mistralai/worse", "--estimate", "--cohort", "free")
    assert found.exit_code == 0, found.output
    assert cost["words"]
    # The panel is asked where the models differ alone, and one that is worse does so at most decisions.
    assert 0 < cost["expected_usd"] < cost["most_usd"]
    assert len(cost["teachers"]) == 1 + len(cost["panel"])
    report = ask(root, "mistralai/worse", "--cohort", "free", "--budget", "5")[1]
    assert report["spent_usd"] <= cost["most_usd"]
    after = ask(root, "mistralai/other", "--estimate", "--cohort", "free")[1]
    assert cost["share_apart"] < after["share_apart"] < report["n_apart"] / report["n_judged"]


def test_without_an_answer_and_without_a_network_what_is_known_is_told(root, tmp_path):
    """The scores come with the program, so they are told before an error says that the rest is not to be had."""
    found = CliRunner().invoke(app, ["verdict", "--data", str(root)])
    assert found.exit_code == 0, found.output
    assert "No teacher has answered yet" in found.stdout
    offline = tmp_path / "offline.toml"
    told = (root / "settings.toml").read_text("utf-8")
    offline.write_text(re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:9", told), "utf-8")
    given = ["verdict", "mistralai/new", "--estimate", "--data", str(root)]
    found = CliRunner().invoke(app, [*given, "--settings", str(offline)])
    assert isinstance(found.exception, PriceError)
    assert "which wrote these sessions" in " ".join(found.stdout.split())


def test_other_instructions_stand_in_the_place_of_the_projects_own():
    prompt = (
        "<system-reminder>\n# claudeMd\nContents of /home/a/.claude/CLAUDE.md (user's private global instructions "
        "for all projects):\n\nBe short.\n\nContents of /home/a/shop/CLAUDE.md (project instructions, checked into the "
        "codebase):\n\nRun the tests.\n\n## Style\nTabs.\n# currentDate\nToday.\n\n      IMPORTANT: this context may"
    )
    state = {
        "messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": prompt}]
    }
    told, answer = (each["content"] for each in instructed(state, "Never push.\n")["messages"])
    assert told == prompt.replace("Run the tests.\n\n## Style\nTabs.", "Never push.")
    assert answer == prompt
    parts = [{"type": "text", "text": prompt}, {"type": "image_url", "image_url": {"url": "data:"}}]
    [message] = instructed({"messages": [{"role": "user", "content": parts}]}, "Never push.")[
        "messages"
    ]
    assert message["content"] == [{"type": "text", "text": told}, parts[1]]


def test_instructions_without_a_place_are_refused_before_the_model_is_paid(root, tmp_path):
    file = tmp_path / "CLAUDE.md"
    file.write_text("Never push.")
    with pytest.raises(ConfigError, match=r"no prompt .* CLAUDE\.md"):
        ask(root, "mistralai/worse", "--instructions", str(file))


PROMPT = """Build it in steps.
<system-reminder>
# claudeMd
Contents of /home/mira/tide/CLAUDE.md (project instructions, checked into the codebase):

Run make after each step.

      IMPORTANT: this context may or may not be relevant.
</system-reminder>"""


def test_other_instructions_reach_the_model_alone_and_get_a_verdict_of_their_own(tmp_path):
    session = SessionBuilder("built", cwd="/home/mira/tide")
    session.user(PROMPT)
    for number in range(40):
        made = session.assistant(calls=[ToolCall("Bash", {"command": f"make step-{number}"})])
        session.result(made.tool_use_ids[0], "done")
    session.assistant("Built.")
    bare = SessionBuilder("bare", cwd="/home/mira/tide")
    bare.user("Ship it.")
    made = bare.assistant(calls=[ToolCall("Bash", {"command": "make step-0"})])
    bare.result(made.tool_use_ids[0], "done")

    def reply(_, data):
        body = json.loads(data)
        prompt = json.dumps(body["messages"])
        n = sum(message["role"] == "tool" for message in body["messages"])
        is_told = "Never run make." in prompt
        message = says("I don't run make.") if is_told else bash(f"make step-{n}")
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        n_read = len(data) // 4
        usage = {"prompt_tokens": n_read, "completion_tokens": 10, "total_tokens": n_read + 10}
        answer = {"id": "a", "model": body["model"], "choices": [choice], "usage": usage}
        return 200, {}, json.dumps(answer).encode()

    file = tmp_path / "CLAUDE.md"
    file.write_text("Never run make.")
    with OddServer(reply) as server:
        models = ("mistralai/m", "deepseek/d", "qwen/q")
        cheap = {"prompt": 1e-7, "completion": 2e-7}
        teachers = [server.teacher(name=each, model=each, price=cheap) for each in models]
        paths = [each.write(tmp_path / "projects") for each in (session, bare)]
        write_settings(
            tmp_path / "d",
            ingest={"sources": paths},
            replay={"teachers": teachers, "student": server.teacher(name="student"), "ask_at": "consequences"},
        )  # fmt: skip
        Pipeline(Settings.load(data_dir=tmp_path / "d")).ingest_new()
        found, plain = ask(tmp_path / "d", models[0])
        assert (found.exit_code, plain["answer"]) == (0, "could"), found.output
        n_before = len(server.bodies)
        found, told = ask(tmp_path / "d", models[0], "--instructions", str(file))
        bodies = [*map(json.loads, server.bodies)]
    assert (found.exit_code, told["answer"]) == (3, "could not"), found.output
    assert "with these instructions could not" in told["words"]
    for number, body in enumerate(bodies):
        prompt = json.dumps(body["messages"])
        is_told = "Never run make." in prompt
        assert is_told == (number >= n_before and body["model"] == models[0])
        # A prompt that shows no CLAUDE.md says nothing of another one, so nobody is asked there again.
        assert is_told != (("Run make after each step." in prompt) or "Ship it." in prompt)
    # Nobody is asked who was right where the model did what the agent did: everywhere but at the end.
    n_panel = sum(body["model"] in models[1:] for body in bodies[:n_before])
    assert n_panel == 2 < sum(body["model"] in models[1:] for body in bodies[n_before:])
