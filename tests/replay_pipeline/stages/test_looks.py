"""What teachers look for at the states of a real session, held to the files and answers that were there."""

from contextlib import ExitStack, closing

import pytest

from replay_pipeline.errors import ConfigError
from replay_pipeline.replay.ask.rows import continuations_from_table
from replay_pipeline.settings import Settings
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.stages.views.page import write_page_of
from replay_pipeline.stages.views.tracing import trace_state
from replay_pipeline.stages.work.looks import LoggedLooks
from replay_pipeline.types import SAMPLE_TEACHERS
from tests.support.looking import call
from tests.support.pages import data_of
from tests.support.teachers import TeacherServer
from tests.support.worked import Worked

FILES = {
    "tide/high.py": "def high():\n    return 3\n",
    "tide/low.py": "def low():\n    return 1\n",
    "tide/keys.py": 'AWS_SECRET_ACCESS_KEY = "Zq7TnV2wsmpl0fakeK3yZp9LrB4uXcH8mJd1eGsW"\n',
}


@pytest.fixture
def work(open_path):
    """Read, edit, look at the status, edit the other file, and end; its folder is that of a person."""
    work = Worked(open_path / "home" / "mira" / "tides")
    work.begin(FILES)
    work.read("tide/high.py")
    work.edit("tide/high.py", "return 3", "return 4")
    work.bash("git status --short")
    work.read("tide/low.py")
    work.edit("tide/low.py", "return 1", "return 2")
    work.session.assistant("Done.")
    return work


def opened(tmp_path, work, execute="off", **replay):
    path = work.session.write(tmp_path / "projects")
    changes = {
        "ingest": {"sources": [str(path)]},
        "replay": replay,
        "workspaces": {"execute": execute},
    }
    pipeline = Pipeline(Settings.load(data_dir=tmp_path / "data", changes=changes))
    batches = pipeline.ingest_new() or pipeline.batches()
    return pipeline, batches[0]


@pytest.fixture
def looks_at():
    """Who answers looks at the states of a batch, closed in the end."""
    with ExitStack() as stack:
        yield lambda *given: stack.enter_context(closing(LoggedLooks(*given)))


def seen(looks, state, name, **arguments):
    answers = looks(state, call(name, **arguments))
    return None if answers is None else (answers[0].text, answers[0].source)


def test_a_look_shows_what_was_there_then_and_what_nobody_knows_stays_open(
    tmp_path, work, looks_at
):
    pipeline, batch = opened(tmp_path, work)
    first, second, last = pipeline.asked_states([batch])
    looks = looks_at(pipeline, [batch])
    cwd = first["cwd"]
    assert "mira" not in cwd
    high = f"{cwd}/tide/high.py"
    # As it was: before the edit, between both, and after the last call.
    before, after = (f"     1→def high():\n     2→    return {n}\n     3→" for n in (3, 4))
    assert seen(looks, first, "Read", file_path=high) == (before, "log")
    assert seen(looks, second, "Read", file_path=high) == (after, "files")
    assert seen(looks, last, "Read", file_path="tide/low.py") == (
        "     1→def low():\n     2→    return 2\n     3→", "files",
    )  # fmt: skip
    assert (
        seen(looks, first, "Grep", pattern="def", path="tide", output_mode="content")[1] == "files"
    )
    found, _ = seen(looks, first, "Glob", pattern="**/*.py")
    assert f"{cwd}/tide/low.py" in found.split("\n")
    # The agent's own look, which no later change has outdated; one that it made before a change is none.
    status = seen(looks, second, "Bash", command="git status --short")
    assert status == (" M tide/high.py", "log")
    assert seen(looks, first, "Bash", command="git status --short") is None
    assert seen(looks, last, "Bash", command="git status --short") is None
    assert seen(looks, first, "TodoWrite", todos=[])[1] == "fixed"
    for name, arguments in (
        ("Read", {"file_path": "/etc/hosts"}),
        ("Read", {"file_path": f"{cwd}/untracked.txt"}),
        ("Bash", {"command": "ls -la"}),
        ("WebFetch", {"url": "https://example.com", "prompt": "x"}),
    ):
        assert seen(looks, first, name, **arguments) is None, name


def test_commands_that_show_files_run_where_commands_may(tmp_path, work, looks_at):
    pipeline, batch = opened(tmp_path, work, execute="commands")
    first, second, _ = pipeline.asked_states([batch])
    looks = looks_at(pipeline, [batch])
    for state, n in ((first, 3), (second, 4)):
        told = seen(looks, state, "Bash", command="cd tide && cat high.py | head -2")
        assert told == (f"def high():\n    return {n}", "command")
    assert "Begin" in seen(looks, first, "Bash", command="git log --oneline")[0]
    assert seen(looks, first, "Bash", command="pwd") is not None
    assert seen(looks, first, "Bash", command="wc -l tide/low.py")[0] == "2 tide/low.py"
    # Which file comes first, nobody knows: so it is told where `head` cuts nothing.
    assert (
        seen(looks, first, "Bash", command="grep -n turn.3 tide/*.py | head -5")[0]
        == "tide/high.py:2:    return 3"
    )
    assert seen(looks, first, "Bash", command="grep -n def tide/*.py | head -1") is None
    for command in ("ls -la", "cat ignored.txt", "git status", "date", "curl https://example.com"):
        assert seen(looks, first, "Bash", command=command) is None, command


def test_of_several_calls_those_that_nobody_can_answer_are_said_to_be_not_available(
    tmp_path, work, looks_at
):
    pipeline, batch = opened(tmp_path, work)
    looks, state = looks_at(pipeline, [batch]), pipeline.asked_states([batch])[0]
    lost, shown = call("Bash", command="ls -la"), call("Read", file_path="tide/low.py")
    both = {**lost, "tool_calls": lost["tool_calls"] + shown["tool_calls"]}
    [one, other] = looks(state, both)
    assert (one.source, other.source) == ("unknown", "log")
    assert "Not available" in one.text
    books = call("TodoWrite", todos=[])
    assert looks(state, {**lost, "tool_calls": lost["tool_calls"] + books["tool_calls"]}) is None


def test_nothing_of_a_file_that_no_prompt_may_show_reaches_a_teacher(tmp_path, work, looks_at):
    pipeline, batch = opened(tmp_path, work)
    state = pipeline.asked_states([batch])[0]
    text, _ = seen(looks_at(pipeline, [batch]), state, "Read", file_path="tide/keys.py")
    assert "AWS_SECRET" in text
    assert "Zq7TnV2w" not in text
    assert "mira" not in text


def test_the_pipeline_asks_on_and_keeps_every_step(tmp_path, work):
    pipeline, batch = opened(tmp_path, work)
    states = pipeline.asked_states([batch])
    answers = {}
    for spec in SAMPLE_TEACHERS:
        for state in states:
            step = state["state_id"]
            answers.setdefault(step, {})[spec.model] = call("Read", file_path="tide/low.py")
            answers.setdefault(f"{step}+1", {})[spec.model] = state["student_action"]
    with TeacherServer(answers) as server:
        teachers = [spec.model_dump(exclude_unset=True) for spec in server.teachers()]
        settings = {"teachers": teachers, "gates": [], "looks_share": 9}
        pipeline, batch = opened(tmp_path, work, **settings)
        report = pipeline.replay(batch).report
        assert report["n_sent"] == server.bill().n_charged == 2 * len(answers) // 2 * 3
        state_id = states[0]["state_id"]
        [step] = trace_state(pipeline, state_id)["replay"][
            f"{SAMPLE_TEACHERS[0].name} looked first"
        ]
        assert step["calls"].startswith("Read ")
        assert "return 1" in step["answers"][0]["text"]
        write_page_of(pipeline, tmp_path / "page")
        [answers] = [
            value for name, value in data_of(tmp_path / "page").items() if "answers-" in name
        ]
        assert all(each["looks"] for each in answers["answers"][state_id])
        once = {**settings, "max_looks": 0}
        unasked = opened(tmp_path, work, **once)[0]
        none = unasked.replay(batch).report
        write_page_of(unasked, tmp_path / "unasked")
    rows = pipeline.root.read("teacher_actions", batch).to_pylist()
    assert report["errors"] == {}
    assert none["only_looked"] == {"still_looking": len(rows)}
    assert not none["n_sent"]
    shown = data_of(tmp_path / "unasked")
    [answers] = [value for name, value in shown.items() if "answers-" in name]
    assert {each["verdict"] for each in answers["answers"][state_id]} == {"looked"}
    assert len(rows) == 3 * len(states)


def test_teachers_go_on_behind_their_votes_and_each_step_is_carried_out_and_paid_once(
    tmp_path, work
):
    """They edit another file than the agent, read it, and end: three votes, two steps behind each."""
    pipeline, batch = opened(tmp_path, work)
    states = [*pipeline.asked_states([batch])]
    state_id, low = states[0]["state_id"], f"{states[0]['cwd']}/tide/low.py"
    edit = call("Edit", file_path=low, old_string="return 1", new_string="return 5")
    done = {"role": "assistant", "content": "Done."}
    names = [spec.model for spec in SAMPLE_TEACHERS]
    answers = {state["state_id"]: dict.fromkeys(names, done) for state in states[1:]}
    answers[state_id] = dict.fromkeys(names, edit)
    for spec in SAMPLE_TEACHERS:
        answers[f"{state_id}>{spec.name}+1"] = {spec.model: call("Read", file_path=low)}
        answers[f"{state_id}>{spec.name}+2"] = {spec.model: done}
    with TeacherServer(answers) as server:
        teachers = [spec.model_dump(exclude_unset=True) for spec in server.teachers()]
        asked = {"teachers": teachers, "gates": [], "steps_after": 3}
        with pytest.raises(ConfigError, match="steps_after"):
            opened(tmp_path, work, **asked)[0].replay(batch)
        pipeline, batch = opened(tmp_path, work, "files", **asked)
        report = pipeline.replay(batch).report
        n_charged = server.bill().n_charged
        assert report["n_after"] == 6
        assert n_charged == 3 * len(states) + 6
        assert round(report["newly_spent_usd"] * 1e9) == server.bill().total_nano
        fewer, _ = opened(tmp_path, work, "files", **asked | {"steps_after": 1})
        again = fewer.replay(batch).report
        assert (again["n_after"], again["newly_spent_usd"]) == (3, 0)
        assert server.bill().n_charged == n_charged
        pipeline.replay(batch)
    steps = continuations_from_table(pipeline.root.read("teacher_actions", batch))
    assert [step.n_after for step in steps] == [1, 2] * 3
    vote, look = steps[1].looks
    assert "has been updated" in vote.answers[0].text
    assert look.answers[0].text.splitlines()[1] == "     2→    return 5"
    assert vote.answers[0].source == "run"
    pipeline.pairs(batch)
    rows = pipeline.root.read("positives", batch).to_pylist()
    went_on = [row for row in rows if row["kind"] == "continuation"]
    assert [row["n_looks"] for row in went_on] == [1, 2] * 3
    assert {row["teachers_agreeing"][0] for row in went_on} == {s.name for s in SAMPLE_TEACHERS}


def test_a_task_is_updated_as_the_client_tells_it_if_the_prompt_knows_the_task(
    tmp_path, work, looks_at
):
    pipeline, batch = opened(tmp_path, work)
    looks, state = looks_at(pipeline, [batch]), pipeline.asked_states([batch])[0]
    done = {"taskId": "1", "status": "completed"}
    assert seen(looks, state, "TaskUpdate", **done) is None
    made = [
        {**call("TaskCreate", subject="Raise"), "content": None},
        {
            "role": "tool",
            "tool_call_id": "call_1",
            "content": "Task #1 created successfully: Raise",
        },
    ]
    state = {**state, "messages": [*state["messages"], *made]}
    assert seen(looks, state, "TaskUpdate", **done) == ("Updated task #1 status", "fixed")
    assert seen(looks, state, "TaskCreate", subject="x")[0].startswith("Task #2 created")
    again = {**state, "messages": [*state["messages"], call("TaskUpdate", **done)]}
    assert seen(looks, again, "TaskUpdate", **done) == ("Updated task #1 ", "fixed")
