"""States are shown below the harness of the client that wrote them, where it was learned."""

import json

import pytest
from msgspec import structs

from replay_pipeline.harness import Framing, Harness, HarnessStore
from replay_pipeline.harness.reminders import ListReminder
from replay_pipeline.ingesters import Traces, ingest, system_prompt
from replay_pipeline.settings import Settings
from replay_pipeline.stages.harness import (
    learn_harness,
    list_harnesses,
    show_harness,
)
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.stages.publish import PUBLISH
from replay_pipeline.stages.shown import shown_below
from replay_pipeline.testing.sample import REQUEST_FILE, SESSIONS_DIR

VERSION = "2.1.38"


def tool(name):
    function = {
        "name": name,
        "description": f"{name} of the client.",
        "parameters": {"type": "object"},
    }
    return {"type": "function", "function": function}


MAIN = Framing(
    system=["You are a client.", "Work in ⟦cwd⟧.\nThe shell is ⟦shell⟧.\nYou are ⟦model⟧."],
    tools=[tool("Write"), tool("Bash")],
    before=["<system-reminder>\nBe kind.\n</system-reminder>\n"],
    after=[{"role": "system", "content": "Skills: none."}],
)
HELPER = Framing(system=["You are a helper in ⟦cwd⟧."], tools=[tool("Bash")])


def harness(version=VERSION, **framings):
    return Harness(
        agent="claude_code", version=version, how="asked", framings={"main": MAIN, **framings}
    )


@pytest.fixture(scope="module")
def ingested():
    return ingest(SESSIONS_DIR)


def states(ingested, store):
    tables = {name: getattr(ingested, name) for name in ("sessions", "turns", "states", "tools")}
    traces = Traces(**tables, harnesses=store)
    versions = dict(
        zip(*(ingested.sessions[n].to_pylist() for n in ("session_id", "versions")), strict=True)
    )
    return [(versions[s["session_id"]][-1], s) for s in traces.materialize()]


def test_system_tools_and_reminders_are_the_clients(tmp_path, ingested):
    store = HarnessStore(tmp_path)
    store.keep(harness(subagent=HELPER))
    own = [s for v, s in states(ingested, store) if v == VERSION]
    mains = [s for s in own if ".agent-" not in s["session_id"]]
    helpers = [s for s in own if ".agent-" in s["session_id"]]
    assert mains
    assert helpers
    for state in mains:
        system, first, behind, *_ = state["messages"]
        lines = system["content"].split("\n")
        assert lines[:2] == ["You are a client.", ""]
        assert lines[2].startswith("Work in /")
        assert lines[3:] == [f"You are {state['student_model']}."]
        assert state["system"] == [lines[0], "\n".join(lines[2:])]
        assert first["content"].startswith(f"{MAIN.before[0]}\n\n")
        assert behind == {"role": "system", "content": "Skills: none."}
        assert [t["function"]["name"] for t in state["tools"]][:2] == ["Write", "Bash"]
        assert state["tools"][0]["function"]["description"] == "Write of the client."
        told = state["harness"]
        assert (told["version"], told["sha"]) == (VERSION, harness(subagent=HELPER).sha)
        assert told["note"] == "not in the log: shell"
    for state in helpers:
        assert state["messages"][0]["content"].startswith("You are a helper in /")
        assert "note" not in state["harness"]


def test_what_is_not_known_is_noted_or_neutral(tmp_path, ingested):
    store = HarnessStore(tmp_path)
    store.keep(harness())
    for version, state in states(ingested, store):
        numbers = tuple(map(int, version.split(".")))
        if "harness" not in state:
            is_older = numbers < tuple(map(int, VERSION.split(".")))
            assert is_older or state["fidelity"] == "exact" or "system" in state
            continue
        note = state["harness"].get("note", "")
        assert ("nearest older version" in note) == (version != VERSION)
        if ".agent-" in state["session_id"]:
            assert "that of a subagent was not asked" in note


def test_without_a_harness_nothing_changes(tmp_path, ingested):
    without = [state for _, state in states(ingested, None)]
    assert without == [state for _, state in states(ingested, HarnessStore(tmp_path))]
    rebuilt = [s for s in without if "system" not in s]
    assert rebuilt
    assert all(s["messages"][0]["content"].startswith(system_prompt()) for s in rebuilt)


@pytest.fixture
def project(tmp_path):
    settings = Settings(data_dir=tmp_path / "data", ingest={"sources": [SESSIONS_DIR]})
    pipeline = Pipeline(settings)
    pipeline.ingest_new()
    return pipeline


def asked(tmp_path):
    """A request as somebody has recorded it."""
    body = {
        "system": "Be a client.",
        "tools": [{"name": "Bash", "input_schema": {"type": "object"}}],
        "messages": [{"role": "user", "content": "Hello"}],
    }
    path = tmp_path / "request.json"
    path.write_text(json.dumps(body))
    return path


def test_learning_makes_replay_stale_and_the_setting_does_not(tmp_path, project):
    (batch,) = project.root.batches("states")
    before = shown_below(project.settings)
    assert before["ingest.harness"] is None
    report = learn_harness(project, request=asked(tmp_path), version=VERSION)
    assert report["states_shown_anew"] > 0
    now = Pipeline(project.settings)
    (told,) = shown_below(project.settings)["ingest.harness"]
    assert told.startswith(f"claude_code {VERSION} ")
    shown = [s for s in now.states([batch]) if "harness" in s]
    assert len(shown) == report["states_shown_anew"]
    neutral = Pipeline(project.settings.model_copy(
        update={"ingest": project.settings.ingest.model_copy(update={"harness": "neutral"})}
    ))  # fmt: skip
    assert shown_below(neutral.settings) == before
    assert not [s for s in neutral.states([batch]) if "harness" in s]


def test_harnesses_are_listed_and_shown(tmp_path, project):
    learn_harness(project, request=asked(tmp_path), version=VERSION)
    report = list_harnesses(project)
    assert [each["version"] for each in report["harnesses"]] == [VERSION]
    shown = {each["version"]: each["harness"] for each in report["clients"]}
    assert shown[VERSION] == VERSION
    assert shown["2.0.64"] == "neutral"
    assert shown["2.1.41"].startswith(f"of {VERSION}, the nearest older version")
    assert show_harness(project, VERSION)["main"]["system"] == ["Be a client."]


def test_the_neutral_form_has_the_texts_of_clients_beside_it(tmp_path, ingested):
    store = HarnessStore(tmp_path)
    store.keep(harness("2.0.0", subagent=HELPER))
    tables = {name: getattr(ingested, name) for name in ("sessions", "turns", "states", "tools")}
    with_texts = list(Traces(**tables, harnesses=store).materialize())
    assert {"exact", "rebuilt"} >= {state["fidelity"] for state in with_texts}
    assert all("system" in state for state in with_texts)
    public = list(Traces(**tables, harnesses=store, is_neutral=True).materialize())
    assert [s["state_id"] for s in public] == [s["state_id"] for s in with_texts]
    for state, own in zip(public, with_texts, strict=True):
        assert state["messages"][0]["content"].startswith(system_prompt())
        assert "system" not in state
        assert "of the client" not in json.dumps([state["tools"], state["messages"]])
        assert "Be kind." not in json.dumps(state["messages"])
        texts = state["client_texts"]
        behind = state["messages"][texts["n_replaced"] :]
        assert [*texts["messages"], *behind] == own["messages"]
        assert texts["tools"] == own["tools"]
        assert texts["n_replaced"] <= 2


def test_reminders_in_mid_conversation_are_shown_and_not_published(tmp_path, ingested):
    store = HarnessStore(tmp_path)
    reminder = ListReminder(text="<system-reminder>\nUse it.\n</system-reminder>")
    main = structs.replace(MAIN, reminders={"todo_reminder": reminder})
    store.keep(harness("2.0.0", main=main))
    tables = {name: getattr(ingested, name) for name in ("sessions", "turns", "states", "tools")}
    shown = list(Traces(**tables, harnesses=store).materialize())
    reminded = [state for state in shown if "Use it." in json.dumps(state["messages"])]
    assert 0 < len(reminded) < len(shown)
    for state in reminded:
        told = [each for each in state["messages"] if "Use it." in str(each["content"])]
        assert {each["role"] for each in told} <= {"tool", "user"}
    for state in Traces(**tables, harnesses=store, is_neutral=True).materialize():
        assert "Use it." not in json.dumps([state["messages"], state.get("client_texts")])
        assert state["client_texts"]["n_replaced"] <= 2


def test_the_sample_has_a_harness_of_its_own(project):
    report = learn_harness(project, request=REQUEST_FILE, version="2.0.0")
    assert report["states_shown_anew"] > 50
    (listed,) = list_harnesses(project)["harnesses"]
    assert listed["version"] == "2.0.0"
    shown = Pipeline(project.settings).states(project.root.batches("states"))
    own = [state for state in shown if "harness" in state]
    assert len(own) == report["states_shown_anew"]
    for state in own:
        head = state["messages"][0]["content"]
        assert head.startswith("You are a coding client of the sample.\n\nRead a file before")
        assert "/home/you/project" not in head
        assert "⟦" not in json.dumps(state["messages"], ensure_ascii=False)
        assert state["tools"][0]["function"]["name"] == "Bash"


def test_an_estimate_says_what_the_clients_own_prompts_add(tmp_path):
    settings = Settings(
        data_dir=tmp_path / "data",
        ingest={"sources": [SESSIONS_DIR]},
        replay={"sample_teachers": True},
    )
    Pipeline(settings).ingest_new()
    before = Pipeline(settings).estimate().added_by_clients
    store = HarnessStore(tmp_path / "data")
    long = Framing(system=["Be thorough. " * 4_000], tools=MAIN.tools)
    store.keep(harness("2.0.0", main=long))
    after = Pipeline(settings).estimate().added_by_clients
    assert after > 0.1
    assert before is None or before < after


def test_the_setting_decides_and_makes_publish_stale(tmp_path):
    here, hub, asked = (
        Settings(data_dir=tmp_path, publish=publish)
        for publish in ({}, {"repo_id": "o/d"}, {"repo_id": "o/d", "client_texts": True})
    )
    told = [
        PUBLISH.settings(settings)["publish"]["client_texts"] for settings in (here, hub, asked)
    ]
    assert told == [False, False, True]
