import pytest
import torch

from tests.trainer.training import contrast_rollouts
from trainer.data.dataset import load_preference_data
from trainer.data.rendering import Renderer
from trainer.data.rollouts import RecordedRollouts, student_rollouts
from trainer.errors import DatasetError
from trainer.model.scoring import chunked_response_logps


@pytest.fixture(scope="module")
def data(dataset_folder):
    return load_preference_data(dataset_folder)


@pytest.fixture
def renderer(tokenizer):
    return Renderer(tokenizer=tokenizer, max_prompt_tokens=400, max_response_tokens=64)


def test_student_rollouts_are_the_students_own_actions_in_full_groups(data, renderer):
    rollouts = student_rollouts(data, renderer, group_size=4)
    assert all(len(group) == 4 for group in rollouts.groups)
    decisions = {d["state_id"]: d for group in rollouts.groups for d in group}
    assert len(decisions) == len(data.pairs) + len(data.positives)
    names = {d["action"]["tool_calls"][0]["function"]["name"] for d in decisions.values()}
    assert names == {"Edit", "Read"}  # Read: where the student did what the teachers would
    for pair in data.pairs:
        assert decisions[pair["state_id"]]["action"] == pair["rejected"][-1]
        assert decisions[pair["state_id"]]["consensus"] == pair["chosen"][-1]


def test_groups_stay_in_a_session_where_they_can(data, renderer):
    rollouts = student_rollouts(data, renderer, group_size=2)
    whole = [g for g in rollouts.groups if len({d["session_id"] for d in g}) == 1]
    assert len(whole) == len(rollouts.groups)


def test_every_process_replays_its_own_part_of_a_group():
    rollouts = RecordedRollouts([[{"state_id": k} for k in range(4)]])
    rows = [{"group": 0}, {"group": 0}]
    parts = [rollouts.expand(rows, first=first, n=4) for first in (0, 2)]
    assert [d["state_id"] for part in parts for d in part] == [0, 1, 2, 3]


def test_behaviour_logps_are_the_models_own(data, renderer, model):
    rollouts = contrast_rollouts(data.pairs[:1], renderer)
    rollouts.add_behaviour_logps(model, logps_of=chunked_response_logps)
    decision = rollouts.groups[0][0]
    ids = decision["prompt_ids"] + decision["action_ids"]
    with torch.no_grad():
        logp = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    n = len(decision["action_ids"])
    expected = logp[-n - 1 : -1].gather(-1, torch.tensor(ids[-n:])[:, None]).squeeze(-1)
    torch.testing.assert_close(torch.tensor(decision["old_logps"]), expected)


def test_nothing_on_record_is_refused(data, renderer):
    from dataclasses import replace

    empty = replace(data, pairs=[], positives=[])
    with pytest.raises(DatasetError, match="rollouts=generate"):
        student_rollouts(empty, renderer, group_size=2)
