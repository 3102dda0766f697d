"""When two final texts say the same: the default judge, on answers of our own making."""

from benchmarks.text_judges import measured, pairs
from replay_pipeline.actions.agreement import choice_of, say_the_same
from replay_pipeline.judge.extract import extract_dpo_pairs
from replay_pipeline.types import TeacherAction


def test_the_set_has_two_hundred_answers():
    said = {(text, kind) for kind, *texts, _ in pairs() for text in texts}
    assert len(said) >= 180  # some texts, such as `(c)`, answer several questions
    assert sum(1 for *_, is_same in pairs() if is_same) >= 150


def test_no_two_different_answers_are_merged_and_choices_are_found():
    found = measured(say_the_same)
    assert found["false_merges"] == 0
    n_found, n = map(int, found["found_by_kind"]["choice"].split(" of "))
    assert n_found >= 0.95 * n


def said(teacher, text):
    message = {"role": "assistant", "content": text}
    return TeacherAction(state_id="s1", teacher=teacher, family=teacher, action=message)


def test_three_answers_that_take_one_option_in_other_words_are_three_votes():
    answers = [
        said("a", "(c)"),
        said("b", "I would choose (c), since nothing has to stop for it."),
        said("c", "Option c. Dual writes let us go back at any time."),
    ]
    state = {
        "state_id": "s1",
        "messages": [{"role": "user", "content": "(a) in place, (b) dump or (c) dual writes?"}],
        "student_action": {"role": "assistant", "content": "(a)"},
    }
    [pair] = extract_dpo_pairs([state], answers)
    assert pair["n_teachers_agreeing"] == 3
    assert choice_of(pair["chosen"]) == "c"
