"""The real package, a real server process, real WebSockets, and TRL's own tool loop."""

import inspect
import json
import urllib.request

import pytest
import torch
from transformers.utils import get_json_schema

from trainer.data.dataset import load_preference_data
from trainer.engines.openenv.client import OpenEnvSession, environment_factory, list_tools
from trainer.errors import EnvironmentFailedError, TrainerConfigError

pytestmark = pytest.mark.filterwarnings("default")
torch.set_num_threads(1)


def consensus_call(row) -> tuple[str, dict]:
    function = row["consensus"]["tool_calls"][0]["function"]
    return function["name"], dict(function["arguments"])


def test_the_reward_is_the_agreement_with_the_consensus(server, dataset):
    session = OpenEnvSession(server)
    row = load_preference_data(dataset).prompts[1]
    start = session.reset(state_id=row["state_id"])
    assert [m["role"] for m in start.observation["prompt"]] == [m["role"] for m in row["prompt"]]
    name, arguments = consensus_call(row)
    answer = session.call(name, arguments)
    assert (answer.reward, answer.is_done, answer.is_refused) == (1.0, True, False)
    session.reset(state_id=row["state_id"])
    assert session.call("Bash", {"command": "rm -r build"}).reward == 0.0
    session.close()


def test_the_server_lists_its_tools_and_tasks(server):
    assert [tool["name"] for tool in list_tools(server)] == ["Bash", "Edit", "Read"]
    with urllib.request.urlopen(f"{server}/tasks") as reply:
        assert {row["split"] for row in json.load(reply)} == {"train", "test"}


def test_a_reset_without_a_state_is_refused(server):
    session = OpenEnvSession(server)
    with pytest.raises(EnvironmentFailedError, match="reset needs state_id"):
        session.reset()
    session.close()
    factory, _ = environment_factory(server, name="World")
    with pytest.raises(TrainerConfigError, match="none of the columns state_id"):
        factory().reset(prompt=[])
    # What TRL takes for tools are the public methods beside its own two.
    names = [name for name, _ in inspect.getmembers(factory, predicate=inspect.isfunction)]
    shown = [name for name in names if not name.startswith("_")]
    assert shown == ["Bash", "Edit", "Read", "get_reward", "reset"]
    assert factory.__name__ == "World"


def test_a_server_that_dies_stops_the_run(mortal_server, dataset, monkeypatch):
    monkeypatch.setattr("trainer.engines.openenv.adapter.MIN_CALLS", 3)
    address, process = mortal_server
    rows = load_preference_data(dataset).prompts
    factory, outcomes = environment_factory(address)
    environment = factory()
    environment.reset(state_id=rows[0]["state_id"])
    process.terminate()
    process.wait(timeout=30)
    for _ in range(3):
        with pytest.raises(EnvironmentFailedError):
            environment.Read(file_path="a.py")
        # A new connection would be another episode.
        assert environment._session is None
    assert outcomes.n_failed == outcomes.n_calls == 3
    with pytest.raises(EnvironmentFailedError, match="3 of the last 3 calls"):
        environment.get_reward()


def test_any_server_becomes_an_environment_with_one_tool(plain_server):
    (tool,) = list_tools(plain_server)
    assert (tool["name"], tool["input_schema"]["required"]) == ("act", ["number"])
    factory, outcomes = environment_factory(plain_server, columns=("number",), name="Game")
    environment = factory()
    for number in (7, 3):
        assert environment.reset(number=number, prompt=[]) == " I think of a number."
        assert [environment.act(number=5), environment.act(number=number)] == [
            "higher" if number > 5 else "lower",
            "right",
        ]
        assert environment.act(number=number) == "The episode is over."
        assert environment.get_reward() == 0.75
    environment.reset(number=1)
    assert "Invalid message" in environment.act(number="many")
    assert environment.act(number=1) == "right"
    schema = get_json_schema(environment.act)["function"]
    assert schema["parameters"]["properties"]["number"]["type"] == "integer"
    assert schema["description"] == "Guess the number."
    assert (outcomes.n_calls, outcomes.n_refused, outcomes.n_failed) == (6, 1, 0)


def scripted(trainer_class, monkeypatch) -> list[str]:
    """Let TRL's loop read our answers where the model would be sampled; gives the prompts.

    At every state one half of a group does what the teachers would, the other deletes files; all
    say "done" when they have seen the result.
    """
    original, prompts = trainer_class._generate_single_turn, []

    def generate(self, prompt_ids, *arguments, **options):
        completions, *rest = original(self, prompt_ids, *arguments, **options)
        texts = [self._tokenizer.decode(ids) for ids in prompt_ids]
        is_first = "The recording ends here." not in texts[0]
        answers = ["done"] * len(completions)
        if is_first:
            prompts.extend(texts)
            for i, row in enumerate(self.rollout_rows):
                name, call = consensus_call(row) if i % 2 == 0 else ("Bash", {"command": "rm -r"})
                call = {"name": name, "arguments": call}
                answers[i] = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        ids = [self._tokenizer(f"{text}<|im_end|>")["input_ids"] for text in answers]
        return ids, *rest

    monkeypatch.setattr(trainer_class, "_generate_single_turn", generate)
    return prompts


def test_trl_trains_on_tool_calls_with_all_three_channels(server, dataset, tmp_path, monkeypatch):
    from trainer.engines.settings_file import read_settings
    from trainer.engines.trl.run import RunParts, run
    from trainer.engines.trl.trainer import ComposerReplicationTrainer

    prompts = scripted(ComposerReplicationTrainer, monkeypatch)
    factory, outcomes = environment_factory(server, name="TraceReplay")
    config = read_settings(
        {
            "dataset": str(dataset),
            "output": str(tmp_path / "out"),
            "rollouts": "generate",
            "tiny": {"vocab_size": 512, "hidden_size": 32, "n_layers": 1},
            "evaluation": {"max_pairs": 2, "max_prompts": 0},
            "trl": {
                "alpha_sdpo": 0.1,
                "beta_replay": 1.0,
                "max_steps": 2,
                "learning_rate": 1e-3,
                "per_device_train_batch_size": 4,
                "num_generations": 4,
                "pairs_per_step": 2,
                "max_completion_length": 160,
                "max_prompt_tokens": 512,
                "max_tool_calling_iterations": 2,
                "render_tools": False,
                "activation_checkpointing": False,
            },
        }
    )
    report = run(config, parts=RunParts(environment=factory))
    assert report["channels_live"] == ["policy", "sdpo", "replay"]
    assert "Tools: Bash(command) Edit(file_path) Read(file_path)" in prompts[0]
    lines = [
        json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [line for line in lines if "tools/call_frequency" in line]
    assert [line["tools/call_frequency"] for line in steps] == [1.0, 1.0]
    assert [line["tools/failure_frequency"] for line in steps] == [0.0, 0.0]
    assert [line["rewards/TraceReplay/mean"] for line in steps] == [0.5, 0.5]
    assert (outcomes.n_calls, outcomes.n_failed) == (8, 0)
