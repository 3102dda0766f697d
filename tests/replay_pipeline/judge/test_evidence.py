"""Agreement of teachers that makes no pair: what prompt, record and the other side say against it."""

import pytest

from replay_pipeline.actions import canonical_action
from replay_pipeline.judge.records import outcomes_table
from replay_pipeline.types import TeacherAction, Trial
from tests.support.messages import bash, call, edit, says, together
from tests.support.votes import extract_pairs


def state(turn=0, action=None, shown="Fix the cart.", **more):
    return {
        "state_id": f"s{turn}",
        "session_id": "session",
        "turn_idx": turn,
        "messages": [{"role": "user", "content": shown}],
        "student_action": action or bash("pytest"),
        "student_model": "claude-opus-4-5-20251101",
        "outcome": "ok",
        **more,
    }


def answers(state_id="s0", **by_family):
    return [
        TeacherAction(state_id=state_id, teacher=name, model=f"{name}/m", action=action)
        for name, action in by_family.items()
    ]


def judge(states, rows, **options):
    """Outcome and reason of the first state; the report counts it and the table holds it."""
    report = extract_pairs(states, rows, **options)
    row = report.outcomes[0]
    assert report.outcome_counts[row["outcome"]] >= 1
    assert outcomes_table(report.outcomes)["why"].to_pylist()[0] == row["why"]
    assert bool(report.pairs) == (row["outcome"] == "pair")
    return row["outcome"], row["why"]


LS = {"qwen": bash("ls"), "glm": bash("ls")}


@pytest.mark.parametrize("n_steps", [1, 2, 3])
def test_what_the_student_does_itself_a_few_steps_later_is_deferred(n_steps):
    later = [state(n, bash("ls" if n == n_steps else f"echo {n}")) for n in (1, 2, 3)]
    outcome, why = judge([state(), *later[::-1]], answers(**LS))
    assert outcome == "deferred"
    assert why == f"the student does it {n_steps} steps later"


def test_a_step_that_comes_too_late_or_on_request_defers_nothing():
    later = [state(n, bash(f"echo {n}")) for n in (1, 2, 3)]
    assert judge([state(), *later, state(4, bash("ls"))], answers(**LS))[0] == "pair"
    told = state(1, bash("ls"))
    told["messages"] = [*told["messages"], {"role": "user", "content": "Look around first."}]
    assert judge([state(), told], answers(**LS))[0] == "pair"
    assert judge([state(), state(1, bash("ls"), session_id="x")], answers(**LS))[0] == "pair"


def test_what_a_tool_says_in_between_is_no_word_of_the_user():
    later = state(1, bash("ls"))
    later["messages"] = [*later["messages"], {"role": "tool", "content": "2 failed"}]
    assert judge([state(), later], answers(**LS))[0] == "deferred"


def test_an_earlier_or_an_unnumbered_step_defers_nothing():
    assert judge([state(5), state(4, bash("ls"))], answers("s5", **LS))[0] == "pair"
    unnumbered = state(1, bash("ls"))
    del unnumbered["turn_idx"]
    assert judge([state(), unnumbered], answers(**LS))[0] == "pair"


def test_the_judge_of_texts_says_too_what_the_student_does_later():
    def same_start(one, other):
        return one[:4] == other[:4]

    rows = answers(qwen=says("Done at last."), glm=says("Done."))
    steps = [state(action=says("Shall I?")), state(1, says("Done!"))]
    assert judge(steps, rows, same_text=same_start)[0] == "deferred"


def test_what_is_deferred_goes_by_the_level_that_is_asked_for():
    steps = [state(action=bash("make")), state(1, bash("pytest -x"))]
    rows = answers(qwen=bash("pytest"), glm=bash("pytest"))
    assert judge(steps, rows)[0] == "pair"
    assert judge(steps, rows, level="target")[0] == "deferred"


def test_what_the_student_does_after_its_own_action_failed_is_a_pair():
    failed = state(outcome="tool_error")
    assert judge([failed, state(1, bash("ls"))], answers(**LS))[0] == "pair"


@pytest.mark.parametrize(
    ("action", "why"),
    [
        (edit("cart.py", "a = 1\nb = 2"), None),
        (edit("cart.py", "a = 1\nc = 3"), "the text that is replaced in cart.py was never shown"),
        (edit("shop.py", "a = 1"), "shop.py was never named"),
        (call("Read", file_path="/home/ada/shop.py"), "shop.py was never named"),
        (call("Read", file_path="/home/ada/src/cart.py"), None),
        (call("Write", file_path="new.py", content="x"), None),
    ],
)
def test_an_action_that_needs_what_was_never_shown_is_infeasible(action, why):
    seen = state(shown="src/cart.py has:\n     1→a = 1\n     2→    b = 2\n")
    found = judge([seen], answers(qwen=action, glm=action))
    assert found == (("infeasible", why) if why else ("pair", None))


def multi_edit(*changes):
    edits = [{"old_string": old, "new_string": new} for old, new in changes]
    return call("MultiEdit", file_path="cart.py", edits=edits)


NEVER_SHOWN = "the text that is replaced in cart.py was never shown"


@pytest.mark.parametrize(
    ("actions", "why"),
    [
        ([multi_edit(("a = 1", "b = 2"), ("c = 3", "d = 4"))], NEVER_SHOWN),
        ([multi_edit(("a = 1", "b = 2"), ("\n\n   a = 1", "b = 2"))], None),
        ([multi_edit(("a = 1", "if b:\n    c = 3"), ("c = 3\n", ""))], None),
        ([multi_edit(("a = 1", ""), ("c = 3", "a = 1"))], NEVER_SHOWN),
        ([multi_edit(("a = 1", "c = 3"), ("a = 1", "d = 4"), ("c = 3", "d = 4"))], None),
        ([bash("ls"), edit("cart.py", "c = 3")], NEVER_SHOWN),
        ([call("Read", file_path="cart.py"), edit("cart.py", "c = 3")], NEVER_SHOWN),
        ([edit("cart.py", "a = 1", "c = 3"), edit("cart.py", "c = 3")], None),
        ([bash("ls"), call("Read", file_path="shop.py")], "shop.py was never named"),
        ([call("NotebookEdit", notebook_path="a.ipynb", new_source="")], "a.ipynb was never named"),
        ([call("NotebookEdit", notebook_path="cart.py", new_source="")], None),
        ([call("Read", file_path="cart.py", edits="all")], None),
        ([call("Edit", file_path="cart.py", old_string="c = 3", new_string="", edits=[])], NEVER_SHOWN),
    ],
)  # fmt: skip
def test_every_change_and_call_must_be_possible_where_it_stands(actions, why):
    action = together(*actions)
    found = judge([state(shown="cart.py: a = 1")], answers(qwen=action, glm=action))
    assert found == (("infeasible", why) if why else ("pair", None))


def called(arguments):
    call = {"function": {"name": "Look", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "See cart.py."}]},
        {"role": "tool", "tool_call_id": "1", "content": "src/cart.py"},
        called('{"in": {"files": [1, "cart.py"]}}'),
        called({"files": ["cart.py"]}),
        called("{cart.py"),
        called('{"name": "\ud800 cart.py"}'),
        called("[" * 5_000 + "cart.py"),
    ],
)
def test_a_file_is_named_wherever_in_the_prompt_it_stands(message):
    seen = state(shown="Look around.")
    action = call("Read", file_path="cart.py")
    assert judge([seen], answers(qwen=action, glm=action))[0] == "infeasible"
    empty = {"role": "assistant", "tool_calls": [{"id": "cut off"}, {"function": None}]}
    seen["messages"] = [*seen["messages"], empty, message]
    assert judge([seen], answers(qwen=action, glm=action))[0] == "pair"


def test_the_end_of_one_message_and_the_beginning_of_the_next_are_no_name():
    seen = state(shown="ca")
    seen["messages"] = [*seen["messages"], {"role": "user", "content": "rt.py"}]
    action = call("Read", file_path="cart.py")
    assert judge([seen], answers(qwen=action, glm=action))[0] == "infeasible"


def test_a_file_is_known_by_its_name_however_its_folders_are_written():
    action = call("Read", file_path="C:\\shop\\cart.py")
    assert judge([state(shown="Fix cart.py.")], answers(qwen=action, glm=action))[0] == "pair"


def test_text_that_an_earlier_call_wrote_was_shown():
    wrote = call("Write", file_path="cart.py", content='a = "1"\nb = 2\n')
    seen = state()
    seen["messages"] = [*seen["messages"], wrote]
    change = edit("cart.py", 'a = "1"')
    assert judge([seen], answers(qwen=change, glm=change))[0] == "pair"


def test_a_look_is_a_repetition_from_the_folder_of_its_session_too():
    whole, short = (call("Read", file_path=f"{folder}cart.py") for folder in ("/w/shop/", ""))
    asked = {"role": "user", "content": "Fix cart.py."}
    shown = [asked, whole, {"role": "tool", "content": "     1\u2192total = 1"}]
    for cwd, is_repeated in (("/w/shop", True), ("/w", False)):
        _, why = judge([state(messages=shown, cwd=cwd)], answers(qwen=short, glm=short))
        assert str(why).startswith("it was shown already") is is_repeated


def test_a_file_that_the_student_knows_counts_as_named():
    rules = call("Read", file_path="/home/ada/RULES.md")
    student = call("Edit", file_path="/home/ada/RULES.md", old_string="a", new_string="b")
    assert judge([state(action=student)], answers(qwen=rules, glm=rules))[0] == "pair"


def test_a_tool_that_was_not_on_offer_has_no_vote():
    bash_only = [{"type": "function", "function": {"name": "Bash", "parameters": {}}}]
    glob = call("Glob", pattern="*")
    report = extract_pairs([state(tools=bash_only)], answers(qwen=glob, glm=glob))
    assert report.outcome_counts == {"too_few_answers": 1}
    assert report.outcomes[0]["n_invalid"] == 2


@pytest.mark.parametrize(
    "words",
    [
        "I'm sorry, but I can't help with that.",
        "Sorry, I won't do this.",
        "I cannot assist with this request.",
        "As an AI, I have no opinion.",
        "Unfortunately, I am unable to run commands.",
        "Es tut mir leid, dabei kann ich nicht helfen.",
        "Ich kann diese Datei leider nicht löschen.",
        "Lo siento, pero no puedo hacer eso.",
        "Je suis désolé, je ne peux pas vous aider.",
        "Mi dispiace, non posso farlo.",
        "Infelizmente, não posso ajudar com isso.",
        "К сожалению, я не могу этого сделать.",
        "申し訳ありませんが、それはできません。",
        "抱歉，我无法完成这个请求。",
        "죄송하지만 도와드릴 수 없습니다.",
        "عذرًا، لا أستطيع المساعدة في ذلك.",
        "क्षमा करें, मैं यह नहीं कर सकता।",
    ],
)
def test_the_same_words_of_refusal_are_no_pair(words):
    rows = answers(qwen=says(words), glm=says(words))
    assert judge([state()], rows)[0] == "refusal"
    assert judge([state(action=says("Which one?"))], rows)[0] == "refusal"


def test_an_end_against_going_on_is_a_lesson_and_no_pair_either_way():
    done = answers(qwen=says("Done."), glm=says("Done."))
    assert judge([state()], done) == ("lesson", "early_stop")
    asks = state(action=says("Shall I go on?"))
    assert judge([asks], done)[0] == "pair"
    [lesson] = extract_pairs([asks], done, min_p_better=0.7).positives
    assert lesson["action"] == "Shall I go on?", "all stop, and the agent says more"
    assert judge([state(action=says("Done!"))], answers(**LS)) == ("lesson", "late_stop")


def test_what_failed_when_the_agent_did_it_is_no_lesson_though_teachers_would_do_it_too():
    rows = answers(qwen=bash("pytest"), glm=bash("pytest"))
    lost = {"outcome": "tool_error", "error_kind": "string_not_found"}
    for told, outcome in (
        ({}, "agreement"),
        # A test that fails is no fault of the command that runs it.
        ({"outcome": "tool_error", "error_kind": "exit_code", "hint": "1 failed"}, "agreement"),
        ({"outcome": "user_rejected"}, "would_fail"),
    ):
        report = extract_pairs([state(**told)], rows)
        assert report.outcomes[0]["outcome"] == outcome
        assert len(report.positives) == (outcome == "agreement")
    edit = call("Edit", file_path="cart.py", old_string="a", new_string="b")
    report = extract_pairs([state(action=edit, **lost)], answers(qwen=edit, glm=edit))
    assert report.outcomes[0]["why"] == "in the log: string_not_found"
    assert report.positives == []


def test_a_pair_is_named_by_its_state_and_its_sides():
    def pair_id(states, rows):
        return extract_pairs(states, rows).pairs[0]["pair_id"]

    one = pair_id([state()], answers(**LS))
    assert pair_id([state()], answers(**LS, kimi=bash("tox"))) == one
    assert pair_id([state(action=bash("tox"))], answers(**LS)) != one
    assert pair_id([state(1)], answers("s1", **LS)) != one


@pytest.mark.parametrize(
    ("action", "outcome"),
    [
        (bash("pytest"), "call_count"),
        (together(bash("pytest"), bash("make docs")), "agreement"),
        (together(bash("make docs"), bash("pytest")), "call_count"),
        (together(bash("make docs"), bash("pytest"), bash("tox")), "pair"),
        (bash("make check"), "pair"),
        (together(bash("make docs"), bash("make check")), "pair"),
    ],
)
def test_fewer_calls_or_another_order_alone_make_no_pair_and_calls_that_are_missing_do(
    action, outcome
):
    seen = state(action=together(bash("pytest"), bash("make docs")))
    assert judge([seen], answers(qwen=action, glm=action)) == (outcome, None)


def test_calls_that_the_agent_makes_one_after_the_other_are_not_missing():
    both = together(bash("pytest"), bash("make docs"))
    rows = answers("s1", qwen=both, glm=both)
    now = state(1, action=bash("pytest"))
    assert judge([now, state(3, action=bash("tox"))], rows)[0] == "pair"
    assert judge([now, state(3, action=bash("make docs"))], rows)[0] == "deferred"


@pytest.mark.parametrize(
    "action",
    [bash("git status"), call("TodoWrite", todos=[]), {"content": "Should I start?"}],
)
def test_what_teaches_nothing_is_neither_a_pair_nor_a_lesson(action):
    student = bash("pytest") if action.get("tool_calls") else {"content": "It is mended."}
    report = extract_pairs([state(action=student)], answers(qwen=action, glm=action))
    assert report.outcome_counts == {"needless": 1}
    assert report.positives == []


def test_calls_are_counted_off_at_the_level_that_is_asked_for():
    agent = together(bash("pytest"), bash("make docs"))
    rows = answers(qwen=bash("pytest -x"), glm=bash("pytest -x"))
    assert judge([state(action=agent)], rows)[0] == "pair"
    assert judge([state(action=agent)], rows, level="target")[0] == "call_count"


def test_what_was_tried_is_told_in_the_row_of_the_state():
    right, wrong = canonical_action(bash("ls")).render(), canonical_action(bash("pytest")).render()
    trials = {
        right: Trial(works=True, is_passing=True, was_passing=False, answer="ok", diff="+x"),
        wrong: Trial(works=False, error_kind="exit"),
    }
    [row] = extract_pairs([state()], answers(**LS), trials={"s0": trials}).outcomes
    assert row["trials"] == {
        right: {"result": "works, check fixed", "answer": "ok", "diff": "+x"},
        wrong: {"result": "fails: exit"},
    }
