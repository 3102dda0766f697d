"""States are shown below the harness of the client that wrote them, where it was recorded."""

import json
import sys
import tempfile
from pathlib import Path

import pytest
from msgspec import structs

from replay_pipeline.errors import ConfigError, StorageError
from replay_pipeline.ingesters import Traces, ingest
from replay_pipeline.ingesters.harness.harness import (
    OF_THE_MODEL,
    Harness,
    HarnessStore,
    fill,
    system_prompt,
)
from replay_pipeline.ingesters.harness.record import record
from replay_pipeline.settings import Settings
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.stages.shown import shown_below
from replay_pipeline.testing.sample import SESSIONS_DIR
from tests.replay_pipeline.ingesters.logs import Log

VERSION = "2.1.38"


def tool(name):
    function = {
        "name": name,
        "description": f"{name} of the client.",
        "parameters": {"type": "object"},
    }
    return {"type": "function", "function": function}


HARNESS = Harness(
    agent="claude_code",
    version=VERSION,
    model="claude-sonnet-4-5",
    system=["You are a client.", f"Work in ⟦cwd⟧.\nThe shell is ⟦shell⟧.\n{OF_THE_MODEL}Be quick."],
    tools=[tool("Write"), tool("Bash")],
    before=["<system-reminder>\nBe kind.\n</system-reminder>\n"],
    after=[{"role": "system", "content": "Skills: none."}],
)


def of(version):
    return structs.replace(HARNESS, version=version)


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
    store.keep(HARNESS)
    own = [s for v, s in states(ingested, store) if v == VERSION]
    assert own
    for state in own:
        system, first, behind, *_ = state["messages"]
        lines = system["content"].split("\n")
        assert lines[:2] == ["You are a client.", ""]
        assert lines[2].startswith("Work in /")
        assert first["content"].startswith(f"{HARNESS.before[0]}\n\n")
        assert behind == {"role": "system", "content": "Skills: none."}
        assert [t["function"]["name"] for t in state["tools"]][:2] == ["Write", "Bash"]
        assert state["tools"][0]["function"]["description"] == "Write of the client."
        told = state["harness"]
        assert (told["version"], told["sha"]) == (VERSION, HARNESS.sha)
        assert "shell" in told["note"]
        assert ("not of a subagent" in told["note"]) == (".agent-" in state["session_id"])


def test_a_line_of_the_model_is_shown_for_the_model_of_the_recording_alone():
    for model, last in (
        ("anthropic/claude-sonnet-4-5-20250929", "Be quick."),
        ("claude-opus-5", ""),
    ):
        filled = fill(HARNESS, cwd="/home/kim/tide", model=model)
        assert filled.system[1] == f"Work in /home/kim/tide.\n{last}"
        assert ("of_the_model" in filled.unfilled) == (not last)


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


CLIENT = """#!{python}
import json, os, subprocess, sys, urllib.request

here, words = os.getcwd(), sys.argv[-1]
if words == "nothing":
    print("no key, no answer")
    sys.exit(1)
if words == "hang":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", os.environ["HOME"]])
address = os.environ["ANTHROPIC_BASE_URL" if sys.argv[1] == "messages" else "OPENAI_BASE_URL"]
path = {{"messages": "/v1/messages", "responses": "/responses", "chat": "/chat/completions"}}[sys.argv[1]]
system = f"Be a client in {{here}}.\\nPlatform: linux\\nKeep notes in {{os.environ['HOME']}}/notes."
schema = {{"type": "object", "properties": {{}}}}
told = [{{"role": "user", "content": [{{"type": "text", "text": text}} for text in ("Be kind.", words)]}}]
title = {{"model": "small", "messages": [{{"role": "user", "content": "A title?"}}]}}
bodies = {{
    "messages": {{"system": [{{"type": "text", "text": system}}], "messages": told + [{{"role": "system", "content": "Skills: none."}}],
                 "tools": [{{"name": "Bash", "description": "Runs.", "input_schema": schema}}]}},
    "responses": {{"instructions": system, "input": [{{**told[0], "type": "message"}}],
                  "tools": [{{"type": "function", "name": "Bash", "description": "Runs.", "parameters": schema}}]}},
    "chat": {{"messages": [{{"role": "system", "content": system}}, *told],
             "tools": [{{"type": "function", "function": {{"name": "Bash", "description": "Runs.", "parameters": schema}}}}]}},
}}
for body in (title, {{"model": "m1", "temperature": 1, **bodies[sys.argv[1]]}}):
    headers = {{"content-type": "application/json", "user-agent": {agent!r}}}
    request = urllib.request.Request(address.rstrip("/") + path, json.dumps(body).encode(), headers)
    assert b"Done." in urllib.request.urlopen(request, timeout=5).read()
"""


def client(tmp_path, agent="claude-cli/2.1.38 (external, cli)"):
    """A program that sends what a client sends."""
    path = tmp_path / "client"
    path.write_text(CLIENT.format(python=sys.executable, agent=agent))
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("api", "presented", "agent"),
    [
        ("messages", "claude-cli/2.1.38 (external, cli)", "claude_code"),
        ("responses", "codex_exec/2.1.38 (Linux)", "codex"),
        ("chat", "opencode/2.1.38 ai-sdk", "opencode"),
    ],
)
def test_a_harness_is_the_first_request_of_a_conversation(tmp_path, api, presented, agent):
    found = record([client(tmp_path, presented), api, "hello"])
    assert (found.agent, found.version, found.model) == (agent, VERSION, "m1")
    assert found.system == ["Be a client in ⟦cwd⟧.\nKeep notes in ⟦home⟧/notes."]
    schema = {"type": "object", "properties": {}}
    assert [each["function"] for each in found.tools] == [
        {"name": "Bash", "description": "Runs.", "parameters": schema}
    ]
    assert found.before == ["Be kind."]
    assert found.after == (
        [{"role": "system", "content": "Skills: none."}] if api == "messages" else []
    )
    assert found.params == {"temperature": 1}
    assert found.slots() == ["cwd", "home"]


def test_what_cannot_be_recorded_is_an_error_that_says_why(tmp_path):
    with pytest.raises(ConfigError, match=r"sent no request .* no key, no answer"):
        record([client(tmp_path), "messages", "nothing"])
    with pytest.raises(ConfigError, match="no such program"):
        record(["no-such-client"])
    nameless = client(tmp_path, "OpenAI/JS 4.1.0")
    with pytest.raises(ConfigError, match="pass --version"):
        record([nameless, "chat", "hello"])
    assert record([nameless, "chat", "hello"], agent="copilot", version="1.0").version == "1.0"
    with pytest.raises(ConfigError, match="file name"):
        HarnessStore(tmp_path).keep(of("../1"))
    place = HarnessStore(tmp_path).keep(HARNESS)
    place.write_text("{}")
    with pytest.raises(StorageError, match="record the harness again"):
        list(HarnessStore(tmp_path))


def test_nothing_of_a_client_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "aside"))
    (tmp_path / "aside").mkdir()
    record([client(tmp_path), "messages", "hang"])
    assert list((tmp_path / "aside").iterdir()) == []
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [each for each in commands if str(tmp_path / "aside").encode() in each]


def test_recording_makes_replay_stale_and_the_setting_does_not(tmp_path, project):
    (batch,) = project.root.batches("states")
    before = shown_below(project.settings)
    assert before["ingest.harness"] is None
    HarnessStore(project.root.path).keep(record([client(tmp_path), "messages", "hello"]))
    now = Pipeline(project.settings)
    (told,) = shown_below(project.settings)["ingest.harness"]
    assert told.startswith(f"claude_code {VERSION} ")
    assert [s for s in now.states([batch]) if "harness" in s]
    neutral = Pipeline(project.settings.model_copy(
        update={"ingest": project.settings.ingest.model_copy(update={"harness": "neutral"})}
    ))  # fmt: skip
    assert shown_below(neutral.settings) == before
    assert not [s for s in neutral.states([batch]) if "harness" in s]


def test_the_neutral_form_has_the_texts_of_clients_beside_it(tmp_path, ingested):
    store = HarnessStore(tmp_path)
    store.keep(of("2.0.0"))
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


def test_a_harness_is_that_of_the_start_of_a_session(tmp_path):
    """In a terminal or without a screen; where the other alone was recorded, the state says so."""
    store = HarnessStore(tmp_path / "store")
    shown, notes = {}, {}
    for entrypoint in ("cli", "sdk-cli"):
        system = [f"You were started as {entrypoint}."]
        store.keep(structs.replace(HARNESS, entrypoint=entrypoint, system=system))
        for start in ("cli", "sdk-cli"):
            log = Log(f"of-{start}", entrypoint=start)
            log.user("go")
            log.says("m1", "done")
            ((_, state),) = states(ingest(log.write(tmp_path), redact=False), store)
            shown[start], notes[entrypoint, start] = state["system"], state["harness"].get("note")
    assert shown == {s: [f"You were started as {s}."] for s in ("cli", "sdk-cli")}
    assert notes["cli", "sdk-cli"] == "started as cli, and not as sdk-cli"
    assert notes["sdk-cli", "cli"] is notes["sdk-cli", "sdk-cli"] is None
