"""GRPO in an environment made of recorded sessions: the reward is what the project's own test says."""

import json
import random

import pytest
import torch
from datasets import Dataset
from transformers.utils import get_json_schema

from tests.support.openenv_session import Session, rows_at
from tests.support.small_repository import RIGHT, WRONG, served
from tests.trainer.training import PLAIN
from trainer.data.collator import ComposerDataCollator
from trainer.data.tiny import corpus, make_model, train_tokenizer
from trainer.engines.openenv.adapter import make_environment
from trainer.engines.trl import ComposerConfig, ComposerReplicationTrainer
from trainer.engines.trl.run import without_upstream_warnings
from trainer.losses.compose import compose_loss

N_STEPS = 3


def edit(change):
    """An answer, as the trainee writes it."""
    arguments = json.dumps({"file_path": "tide.py", **change})
    call = {"type": "function", "function": {"name": "Edit", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def warmed_up(rows, tool):
    """A tiny model that writes the right edit or the wrong one, by chance, and its tokenizer."""
    examples = [
        {"prompt": row["prompt"], "tools": [tool], "chosen": [action], "rejected": [action]}
        for row in rows
        for action in (edit(RIGHT), edit(WRONG))
    ]
    tokenizer = train_tokenizer(corpus(examples), vocab_size=400)
    model = make_model(tokenizer, hidden_size=64, n_layers=2, seed=0)
    collator = ComposerDataCollator(tokenizer, max_prompt_tokens=1024)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    draw = random.Random(0)
    for _ in range(120):
        loss = compose_loss(model, collator(draw.sample(examples, 4))).total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, tokenizer


@pytest.mark.slow
def test_three_steps_of_grpo_are_paid_by_the_tests_of_the_project(tmp_path):
    torch.manual_seed(0)
    with served(tmp_path) as address:
        rows = rows_at(address)
        sessions = [Session(address)]
        tools = [each for each in sessions[0].tools() if each["name"] == "Edit"]

        def open_session():
            sessions.append(Session(address))
            return sessions[-1]

        kind, outcomes = make_environment(tools, open_session, name="Tests")
        paid = []

        class Watched(kind):
            def reset(self, **row):
                self.written = []
                return super().reset(**row)

            def _call(self, name, arguments):
                self.written.append(arguments.get("new_string"))
                return super()._call(name, arguments)

            def get_reward(self):
                paid.append((list(self.written), super().get_reward()))
                return paid[-1][1]

        Watched.__name__ = "Tests"
        model, tokenizer = warmed_up(rows, get_json_schema(kind.Edit))
        settings = {
            "max_steps": N_STEPS, "num_generations": 4, "per_device_train_batch_size": 8,
            "max_completion_length": 80, "max_prompt_tokens": 1024, "max_response_tokens": 80,
            "render_tools": True, "max_tool_calling_iterations": 1, "alpha_sdpo": 0.0,
            "beta_replay": 0.0, "learning_rate": 1e-4, "temperature": 1.0, "seed": 0,
        }  # fmt: skip
        data = [{"prompt": row["prompt"], "state_id": row["state_id"]} for row in rows] * 4
        with without_upstream_warnings():
            trainer = ComposerReplicationTrainer(
                model,
                None,
                ComposerConfig(output_dir=str(tmp_path / "out"), **(PLAIN | settings)),
                pairs=[],
                recorded=None,
                train_dataset=Dataset.from_list(data),
                environment_factory=Watched,
                processing_class=tokenizer,
            )
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with without_upstream_warnings():
            trainer.train()
        for session in sessions:
            session.close()
    logged = [row for row in trainer.state.log_history if "rewards/Tests/mean" in row]
    assert len(logged) == N_STEPS
    assert len(paid) == N_STEPS * 8
    # The reward is the test's: it passes where 4 was written, and nowhere else.
    assert [reward for _, reward in paid] == [
        1.0 if RIGHT["new_string"] in written else 0.0 for written, _ in paid
    ]
    assert {0.0, 1.0} == {reward for _, reward in paid}
    assert outcomes.n_calls > 0 == outcomes.n_failed
    means = [sum(reward for _, reward in paid[i : i + 8]) / 8 for i in range(0, len(paid), 8)]
    assert [row["rewards/Tests/mean"] for row in logged] == pytest.approx(means)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
