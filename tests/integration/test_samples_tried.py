"""Samples of the trainee are tried on the files of their state, like the teachers' answers."""

import json

import pytest

from replay_pipeline.settings import Settings
from replay_pipeline.stages.pipeline import Pipeline
from tests.loopback import QuietHandler, served
from tests.support.worked import Worked

FILES = {"tide/high.py": "def high():\n    return 3\n", "tide/low.py": "LOW = 1\n"}
PRICE = {"prompt": 0.0, "completion": 0.0}


def answering(root):
    """Two teachers edit the file; the trainee writes the same file as a whole."""
    path = str(root / "tide" / "high.py")
    edit = ("Edit", {"file_path": path, "old_string": "return 3", "new_string": "return 5"})
    write = ("Write", {"file_path": path, "content": "def high():\n    return 5\n"})

    class Handler(QuietHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            name, arguments = write if body["model"] == "own" else edit
            function = {"name": name, "arguments": json.dumps(arguments)}
            call = {"id": "c", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
            choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
            usage = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}
            answer = {"id": "a", "object": "chat.completion", "model": body["model"]}
            data = json.dumps(answer | {"choices": [choice], "usage": usage}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


@pytest.mark.parametrize("execute", ["files", "off"])
def test_a_sample_with_the_same_files_as_the_consensus_agrees_where_it_is_tried(tmp_path, execute):
    work = Worked(tmp_path / "tides")
    work.begin(FILES)
    work.read("tide/high.py")
    state = work.edit("tide/high.py", "return 3", "return 4")
    sessions = work.session.write(tmp_path / "projects")

    with served(answering(work.root)) as url:

        def model(name, family):
            spec = {"name": name, "model": name, "family": family, "base_url": f"{url}/v1"}
            return spec | {"api_key_env": None, "dialect": "vllm", "price": PRICE}

        changes = {
            "ingest": {"sources": [sessions], "settle_s": 0, "is_redacted": False},
            "replay": {"teachers": [model("one", "a"), model("two", "b")]},
            "trainee": {"endpoint": model("own", "c"), "n_samples": 1},
            "workspaces": {"execute": execute, "repositories": [work.root]},
        }
        pipeline = Pipeline(Settings.load(data_dir=tmp_path / "data", changes=changes, env={}))
        [batch] = pipeline.ingest_new()
        for stage in (pipeline.replay, pipeline.pairs):
            stage(batch)
        report = pipeline.sample(batch).report
    positives = pipeline.root.read("sampled_positives", batch).to_pylist()
    if execute == "files":
        assert report["tried"]["n_would_fail"] == 1  # before the file is read, all are refused
        assert [row["state_id"] for row in positives] == [state]
    else:
        assert "tried" not in report
        assert positives == []
