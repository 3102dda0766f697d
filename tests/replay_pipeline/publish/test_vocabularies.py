"""Fifty batches with other tools each: one dataset, from the folder and through the Hub."""

import json
import os
import subprocess
import sys

import pytest

from replay_pipeline.publish import publish
from tests.support.forked import forked
from tests.support.hub import HubServer

LOAD = """
import json, sys
import datasets
path, cache = sys.argv[1:]
out = {}
for config in ("pairs", "positives", "prompts", "pairs_distillable"):
    for streaming in (False, True):
        rows = datasets.load_dataset(path, config, cache_dir=cache, streaming=streaming)
        out[f"{config}/{streaming}"] = {split: list(rows[split]) for split in sorted(rows)}
print(json.dumps(out))
"""


def load(path, cache, environment):
    done = subprocess.run(
        forked([sys.executable, "-c", LOAD, str(path), str(cache)], "libraries"),
        env={**{k: v for k, v in os.environ.items() if not k.startswith("HF_")}, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of the client
def test_fifty_vocabularies_load_alike_everywhere(
    tmp_path, make_kept, make_tool, make_call, kept_table, positives_table, monkeypatch
):
    def batch(number):
        kinds = ["string", "integer", "boolean", "array", "object"]
        arguments = {
            f"arg_{number}_{k}": ["x", 3, True, [1, "a"], {"deep": None}][k]
            for k in range(number % 5 + 1)
        }
        described = {name: kinds[k] for k, name in enumerate(arguments)}
        call = make_call(f"Tool{number}", **arguments)
        rows = [
            make_kept(
                number * 3 + k,
                tools_json=json.dumps([make_tool(f"Tool{number}", **described)]) if k else None,
                chosen_messages_json=json.dumps([call]),
            )
            for k in range(3)
        ]
        return f"b{number:02}", kept_table(*rows)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    folder = tmp_path / "set"
    with HubServer() as hub:
        where = {"repo_id": "me/tools", "endpoint": hub.url, "token": hub.token}
        for first in range(0, 50, 10):  # one publication after another, each with new tools
            batches = [batch(number) for number in range(first, first + 10)]
            publish(
                batches,
                folder=folder,
                positives=[(f"b{first:02}", positives_table(900 + first))],
                **where,
            )
        local = load(folder, tmp_path / "c1", {"HF_HUB_OFFLINE": "1"})
        remote = load("me/tools", tmp_path / "c2", {**hub.environment(), "HF_HOME": str(tmp_path)})
    assert local == remote
    for config in ("pairs", "positives", "prompts", "pairs_distillable"):
        assert local[f"{config}/True"] == local[f"{config}/False"]
    rows = [row for split in local["pairs/False"].values() for row in split]
    assert len(rows) == 150
    by_state = {row["state_id"]: row for row in rows}
    (chosen,) = by_state["state-14"]["chosen"]
    assert json.loads(chosen["tool_calls"][0]["function"]["arguments"]) == {
        "arg_4_0": "x", "arg_4_1": 3, "arg_4_2": True, "arg_4_3": [1, "a"], "arg_4_4": {"deep": None},
    }  # fmt: skip
    assert by_state["state-12"]["tools"] is None
    assert json.loads(by_state["state-13"]["tools"])[0]["function"]["name"] == "Tool4"
