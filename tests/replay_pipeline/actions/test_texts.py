"""When two final texts say the same: the default judge, on answers of our own making."""

import pytest

from benchmarks.text_judges import measured, pairs
from replay_pipeline.actions.agreement import say_the_same
from replay_pipeline.types import TeacherAction
from tests.support.messages import says
from tests.support.votes import extract_dpo_pairs


def test_the_set_has_two_hundred_answers():
    said = {(text, kind) for kind, *texts, _ in pairs() for text in texts}
    assert len(said) >= 180  # some texts, such as `(c)`, answer several questions
    assert sum(1 for *_, is_same in pairs() if is_same) >= 150


def test_no_two_different_answers_are_merged_and_choices_are_found():
    found = measured(say_the_same)
    assert found["false_merges"] == 0
    n_found, n = map(int, found["found_by_kind"]["choice"].split(" of "))
    assert n_found >= 0.95 * n


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("Rename it to __init__.py", "Rename it to init.py", False),
        ("Rename it to __init__.py", "Rename it to `__init__.py`.", True),
        ("Delete *.log", "Delete .log", False),
        ("Delete *.log and *.tmp", "Delete .log and .tmp", False),
        ("Use **two** workers", "Use two workers.", True),
        ("Use **2** workers", "Use *3* workers", False),
        ("Do it", "Do not do it", False),
        ("Look in ..", "Look in .", False),
        ("Set _name", "Set name", False),
    ],
)
def test_names_paths_numbers_and_negation_are_content(one, other, is_same):
    assert say_the_same(one, other) is say_the_same(other, one) is is_same


def said(teacher, text):
    return TeacherAction(state_id="s1", teacher=teacher, family=teacher, action=says(text))


def test_three_answers_that_take_one_option_in_other_words_are_three_votes():
    answers = [
        said("a", "(c)"),
        said("b", "I would choose (c), since nothing has to stop for it."),
        said("c", "Option c. Dual writes let us go back at any time."),
    ]
    state = {
        "state_id": "s1",
        "messages": [{"role": "user", "content": "(a) in place, (b) dump or (c) dual writes?"}],
        "student_action": says("(a)"),
    }
    [pair] = extract_dpo_pairs([state], answers)
    assert pair["n_teachers_agreeing"] == 3
    assert say_the_same(pair["chosen"], "(c)")
