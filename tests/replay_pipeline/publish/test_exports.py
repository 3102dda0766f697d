"""The pairs as files of other trainers; the trainers themselves read them in `make test-frameworks`."""

import json

import pytest

from replay_pipeline.errors import ConfigError, SecretFoundError
from replay_pipeline.publish import export, publish
from replay_pipeline.publish.exports import LEFT_OUT
from trainer.data.template import LEFT_OUT as TRAINERS_LEFT_OUT
from trainer.data.template import TemplateFeatures, in_order, plain_messages


def lines(folder):
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        rows += [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return {row["state_id"]: row for row in rows}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory, kept_table, make_kept, make_call):
    folder = tmp_path_factory.mktemp("published") / "set"
    both = make_call("Grep", "I look twice.", pattern="a")
    both["tool_calls"].append({**both["tool_calls"][0], "id": "call_2"})
    messages = [
        {"role": "system", "content": "You are an agent."},
        both,
        {"role": "tool", "tool_call_id": "call_1", "content": "first"},
        {"role": "tool", "tool_call_id": "call_2", "content": "second"},
        {"role": "user", "content": "Go on."},
    ]
    odd = make_kept(3, state_messages_json=json.dumps(messages), tools_json=None)
    publish([("b", kept_table(1, 2, odd, 4))], folder=folder)
    return folder


def test_trl_takes_objects_without_nulls_and_streams_them_as_they_were(
    dataset, tmp_path, make_kept
):
    import datasets

    report = export(dataset, tmp_path / "trl", "trl")
    assert (report.config, sum(report.rows_by_split.values())) == ("pairs_8k", 4)
    assert 100 < report.max_length < 1_024
    loaded = datasets.load_dataset(str(tmp_path / "trl"), cache_dir=str(tmp_path / "cache"))
    rows = {row["state_id"]: row for split in loaded.values() for row in split}
    row, source = rows["state-1"], make_kept(1)
    assert row["prompt"][0] == json.loads(source["state_messages_json"])[0]
    function = row["chosen"][0]["tool_calls"][0]["function"]
    assert function == {"name": "Read", "arguments": {"file_path": "src/module_1.py"}}
    assert row["tools"] == json.loads(source["tools_json"])
    assert rows["state-3"]["tools"] is None


def test_json_lines_are_in_the_openai_form(dataset, tmp_path, make_kept):
    export(dataset, tmp_path, "jsonl", config="pairs")
    row = lines(tmp_path)["state-1"]
    function = row["chosen"][0]["tool_calls"][0]["function"]
    assert json.loads(function["arguments"]) == {"file_path": "src/module_1.py"}
    assert row["tools"] == json.loads(make_kept(1)["tools_json"])
    assert row["hint"] == "The file does not exist."


def test_llama_factory_gets_turns_that_alternate_and_an_index(dataset, tmp_path):
    export(dataset, tmp_path, "llama-factory")
    rows = lines(tmp_path)
    for row in rows.values():
        turns = [turn["from"] for turn in row["conversations"] if turn["from"] != "system"]
        assert len(turns) % 2 == 1
        assert set(turns[::2]) <= {"human", "observation"}
        assert set(turns[1::2]) <= {"gpt", "function_call"}
    system, first, answer, last = rows["state-3"]["conversations"]
    assert system == {"from": "system", "value": "You are an agent."}
    assert first == {"from": "human", "value": LEFT_OUT}
    assert answer["from"] == "gpt"  # a call of its own has no place for words
    assert answer["value"].startswith('I look twice.\n<tool_call>\n{"name": "Grep"')
    assert last["value"].endswith("<tool_response>\nsecond\n</tool_response>\n\nGo on.")
    (called,) = json.loads(rows["state-1"]["chosen"]["value"])
    assert called == {"name": "Read", "arguments": {"file_path": "src/module_1.py"}}
    info = json.loads((tmp_path / "dataset_info.json").read_text("utf-8"))
    assert {entry["file_name"] for entry in info.values()} == {
        path.name for path in tmp_path.glob("*.jsonl")
    }


@pytest.mark.parametrize(("form", "prompt"), [("unsloth", "prompt"), ("axolotl", "messages")])
def test_plain_rows_are_those_of_our_own_trainer(dataset, tmp_path, form, prompt, make_kept):
    export(dataset, tmp_path, form)
    row, source = lines(tmp_path)["state-1"], make_kept(1)
    knows_nothing = TemplateFeatures(
        puts_response_behind_prompt=True, has_system=True, has_tools=False, has_tool_calls=False,
        has_tool_results=False, has_free_order=False, keeps_prefix=True, keeps_thinking=True,
        has_default_system=False, has_parallel_calls=False, ending="", tail="",
    )  # fmt: skip
    given = json.loads(source["state_messages_json"])
    for message in given:
        message["content"] = message["content"] or ""
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    tools = json.loads(source["tools_json"])
    assert row[prompt] == in_order(plain_messages(given, tools, knows_nothing), knows_nothing)
    assert row["rejected"] == json.loads(source["rejected_messages_json"])
    assert LEFT_OUT == TRAINERS_LEFT_OUT


def test_a_second_export_replaces_the_first_and_leaves_other_files(dataset, tmp_path):
    export(dataset, tmp_path, "trl")
    (tmp_path / "NOTES.txt").write_text("mine")
    export(dataset, tmp_path, "unsloth")
    assert {path.name for path in tmp_path.iterdir()} >= {"train.jsonl", "NOTES.txt"}
    assert not (tmp_path / "README.md").exists()


def test_what_is_not_there_is_named(dataset, tmp_path):
    with pytest.raises(ConfigError, match="there are pairs, pairs_distillable, pairs_8k"):
        export(dataset, tmp_path, "trl", config="pairs_4k")
    with pytest.raises(ConfigError, match="not one of trl, llama-factory"):
        export(dataset, tmp_path, "tarball")
    with pytest.raises(ConfigError, match="publish some first"):
        export(tmp_path / "nothing", tmp_path / "out", "trl")


def test_a_secret_that_got_into_the_folder_is_not_exported(tmp_path, kept_table, monkeypatch):
    publish([("b", kept_table(1, 2))], folder=tmp_path / "set")
    from replay_pipeline.redaction.redactor import SecretHit

    monkeypatch.setattr(
        "replay_pipeline.publish.secret_scan.find_secrets_in",
        lambda texts: [[SecretHit(kind="token", start=0, end=1)] for _ in texts],
    )
    with pytest.raises(SecretFoundError):
        export(tmp_path / "set", tmp_path / "out", "jsonl")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
