"""A client's words for a list of tasks that was not used, in the places where the client says them."""

import json

from replay_pipeline.harness import Filled
from replay_pipeline.harness.reminders import ListReminder, PlanReminder, without_plan
from replay_pipeline.ingesters.attachments import shown
from replay_pipeline.ingesters.surroundings import reminded, surrounded

REMINDER = ListReminder(
    text="<system-reminder>\nUse it.\n</system-reminder>",
    listing="<system-reminder>\nUse it: (⟦items⟧)\n</system-reminder>",
    item="#⟦number⟧ [⟦status⟧] ⟦words⟧",
    between="; ",
)
TODO, TASK = {"todo_reminder": REMINDER}, {"task_reminder": REMINDER}


def user(text):
    return {"role": "user", "content": text}


def calls(*named):
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "1", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for name, arguments in named
        ],
    }


def step(n_calls=1, result="  done\n"):
    return [
        calls(*[("Read", {})] * n_calls),
        {"role": "tool", "content": result, "tool_call_id": "1"},
    ]


def places(messages):
    return [n for n, each in enumerate(messages) if "Use it" in str(each.get("content"))]


def noted(kind, **fields):
    return user(shown({"type": kind, **fields}))


def test_a_noted_reminder_ends_the_result_before_it_in_the_clients_words():
    prompt = [user("Go on."), *step(), noted("task_reminder", content=[])]
    *_, last = reminded(prompt, TASK, is_logged=True)
    assert last["content"] == "done\n\n<system-reminder>\nUse it.\n</system-reminder>"
    task = {"id": "7", "status": "pending", "subject": "Mend a\\1"}
    prompt = [user("Go on."), *step(), noted("task_reminder", content=[task])]
    *_, last = reminded(prompt, TASK, is_logged=True)
    assert "Use it: (#7 [pending] Mend a\\1)" in last["content"]


def test_a_noted_reminder_beside_the_users_words_stays_there_in_the_clients():
    prompt = [*step(), user(noted("todo_reminder", content=[])["content"] + "\n\nAnd now?")]
    *_, result, last = reminded(prompt, TODO, is_logged=True)
    assert last["content"] == "<system-reminder>\nUse it.\n</system-reminder>\n\nAnd now?"
    assert result["content"] == "  done\n"


def test_what_a_log_does_not_note_comes_after_ten_blocks_and_again_after_ten():
    prompt = [user("Go on."), *(message for _ in range(21) for message in step())]
    assert places(reminded(prompt, TODO, is_logged=False)) == [20, 40]
    assert places(reminded(prompt, TODO, is_logged=True)) == []
    assert reminded(prompt, {}, is_logged=False) == prompt
    parallel = [user("Go on."), *step(4), *step(5), *step(1)]
    assert places(reminded(parallel, TODO, is_logged=False)) == [6]


def test_every_prompt_begins_with_the_one_before_it():
    prompt = [user("Go on."), *(message for _ in range(30) for message in step())]
    whole = reminded(prompt, TODO, is_logged=False)
    for n in range(1, len(prompt) + 1, 2):
        assert reminded(prompt[:n], TODO, is_logged=False) == whole[:n]


def test_using_the_list_starts_the_count_again_and_its_tasks_are_said():
    todos = [
        {"content": "Look", "status": "completed"},
        {"content": "Mend", "status": "in_progress"},
    ]
    written = [calls(("TodoWrite", {"todos": todos})), step()[1]]
    prompt = [user("Go on."), *step(5), *written, *(each for _ in range(10) for each in step())]
    shown_now = reminded(prompt, TODO, is_logged=False)
    assert places(shown_now) == [24]
    assert "Use it: (#1 [completed] Look; #2 [in_progress] Mend)" in shown_now[24]["content"]
    done = [calls(("TodoWrite", {"todos": [each | {"status": "completed"} for each in todos]}))]
    *_, last = reminded([user("Go on."), *done, step()[1], *step(10)], TODO, is_logged=False)
    assert last["content"].endswith("Use it.\n</system-reminder>")


def test_tasks_are_followed_by_their_numbers():
    made = [("TaskCreate", {"subject": each}) for each in ("Look", "Mend", "Tell")]
    changed = [
        ("TaskUpdate", {"taskId": n, "status": s}) for n, s in (("1", "deleted"), (2, "completed"))
    ]
    prompt = [user("Go on."), calls(*made, *changed, ("TaskUpdate", [])), step()[1], *step(10)]
    *_, last = reminded(prompt, TASK, is_logged=False)
    assert "(#2 [completed] Mend; #3 [pending] Tell)" in last["content"]


def test_what_is_said_in_the_systems_name_is_a_message_of_its_own():
    in_its_name = {"task_reminder": ListReminder(text="Use it.\n", is_system=True)}
    prompt = [user("Go on."), *step(), noted("task_reminder", content=[])]
    *before, last = reminded(prompt, in_its_name, is_logged=True)
    assert (before, last) == (prompt[:-1], {"role": "system", "content": "Use it.\n"})
    mixed = [*step(), user(noted("task_reminder", content=[])["content"] + "\n\nAnd now?")]
    assert reminded(mixed, in_its_name, is_logged=True) == mixed


PLAN = PlanReminder(
    text="<system-reminder>\nPlan mode is active. Write ⟦plan⟧.\n</system-reminder>\n"
)
CONTEXT = (
    "<system-reminder>\nAs you answer the user's questions, mind the date.\n</system-reminder>\n"
)
SKILLS = "<system-reminder>\nYou have skills:\n\n- sail\n</system-reminder>\n"


def begins(words, **fields):
    noted_in = noted("plan_mode", reminderType="full", planFilePath="/p/a.md", **fields)
    return user(f"{words}\n\n\n{noted_in['content']}")


def test_plan_mode_begins_in_the_words_and_at_the_place_of_the_client():
    filled = Filled(system=[], tools=[], before=[SKILLS, CONTEXT], after=[])
    said = PLAN.said("/p/a.md")
    first, _, later = surrounded([begins("Look."), *step()[:1], begins("Again.")], filled, PLAN)
    assert first["content"] == "\n\n".join([SKILLS.rstrip("\n"), said, CONTEXT, "Look."])
    assert later["content"] == f"{said}\n\nAgain."
    ours = surrounded([begins("Look.")], filled)
    assert ours[0]["content"].endswith(begins("Look.")["content"])


def test_plan_mode_begins_in_the_systems_name_where_the_client_says_it_so():
    plan = PlanReminder(text="Plan mode is active. Write ⟦plan⟧.", is_system=True)
    said = {"role": "system", "content": "Plan mode is active. Write /p/a.md."}
    listed = {"role": "system", "content": "You have skills:\n\n- sail"}
    filled = Filled(system=[], tools=[], before=[CONTEXT], after=[listed])
    first, after, _, *later = surrounded(
        [begins("Look."), *step()[:1], begins("Again.")], filled, plan
    )
    assert first["content"] == f"{CONTEXT}\n\nLook."
    assert after["content"] == f"{said['content']}\n\n{listed['content']}"
    assert later == [user("Again."), said]


def test_a_plan_that_is_there_already_and_a_repeated_reminder_are_in_our_words():
    filled = Filled(system=[], tools=[], before=[], after=[])
    (first,) = surrounded([begins("Look.", planExists=True)], filled, PLAN)
    assert "\nThe plan lies in /p/a.md.\n" in first["content"]
    sparse = user(noted("plan_mode", reminderType="sparse", planFilePath="/p/a.md")["content"])
    assert "still on" in sparse["content"]
    assert surrounded([sparse], filled, PLAN) == [sparse]


def test_what_a_client_says_of_plan_mode_is_told_from_the_rest_of_a_message():
    skills = "Agents:\n- one\n\nSkills:\n- sail"
    planning = (
        "Agents:\n- one\n\nPlan mode is active. Write /x/plans/a.md.\n\nAsk.\n\nSkills:\n- sail"
    )
    plain = [("user", ["Hello"]), ("system", [skills])]
    rest, plan = without_plan([("user", ["Hello"]), ("system", [planning])], plain)
    assert plan == PlanReminder(text="Plan mode is active. Write ⟦plan⟧.\n\nAsk.", is_system=True)
    assert rest == plain
    assert without_plan(plain, plain) == (plain, None)
