"""A trained and saved checkpoint of each family whose calls are native, behind `transformers serve`."""

import json

import pytest
from datasets import Dataset, Features, Json, List, Value

from tests.engines.conftest import served
from tests.trainer.data.test_templates import ASKED, LOOKED, NATIVE, TOOLS
from tests.trainer.families import save_family
from tests.trainer.published import CARD
from trainer.data.rendering import RENDERING_FILE
from trainer.engines.settings_file import read_settings
from trainer.engines.trl.run import run

FAMILIES = tuple(name for name in NATIVE if name != "muse_glimmer")
"""Transformers has no causal LM of that one's."""
LEARNS_IT_BY_HEART = {
    "objective": "sft",
    "sft_on": "chosen",
    "policy_weight": 1.0,
    "alpha_sdpo": 0,
    "beta_replay": 0,
    "max_steps": 120,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "pairs_per_step": 1,
    "max_prompt_tokens": 4000,
    "max_response_tokens": 200,
    "max_completion_length": 200,
    "activation_checkpointing": False,
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """One state at which a file is read."""
    folder = tmp_path_factory.mktemp("dataset")
    message = List(Json())
    row = {"state_id": "s", "session_id": "s", "prompt": [ASKED], "tools": TOOLS}
    kinds = {"state_id": Value("string"), "session_id": Value("string")}
    kinds |= {"prompt": message, "tools": Json()}
    rows = {
        "pairs": (
            row | {"chosen": LOOKED[:1], "rejected": [{"role": "assistant", "content": "No."}]},
            kinds | {"chosen": message, "rejected": message},
        ),
        "prompts": (row | {"consensus": LOOKED[0]}, kinds | {"consensus": Json()}),
    }
    for name, (one, of_columns) in rows.items():
        (folder / name).mkdir()
        for split in ("train", "test"):
            table = Dataset.from_list([one], features=Features(of_columns))
            table.to_parquet(folder / name / f"{split}-0.parquet")
    (folder / "README.md").write_text(CARD)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served("checkpoints", tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.mark.parametrize("name", FAMILIES)
def test_the_server_returns_what_was_learned_as_a_native_call(name, dataset, server, tmp_path):
    model = save_family(tmp_path / "model", name)
    settings = {"dataset": str(dataset), "output": str(tmp_path / "out"), "model": str(model)}
    evaluation = {"max_pairs": 1, "max_prompts": 0}
    run(read_settings(settings | {"evaluation": evaluation, "trl": LEARNS_IT_BY_HEART}))
    checkpoint = tmp_path / "out" / "checkpoint"
    asked = {"model": str(checkpoint), "messages": [ASKED], "tools": TOOLS, "temperature": 0}
    told = json.loads((checkpoint / RENDERING_FILE).read_text())["chat_template_kwargs"]
    status, reply = server.post(asked | {"max_tokens": 120, "chat_template_kwargs": told})
    assert status == 200, reply
    [choice] = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "Read"
    assert json.loads(call["function"]["arguments"]) == {"path": "src/cart.py"}
