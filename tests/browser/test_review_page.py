"""The tab of pairs in a real headless browser: open, filter, mark, export, and nothing runs."""

import json
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from replay_pipeline.stages.pages.look import Contents, write_page
from replay_pipeline.stages.pages.pairs import portion, read_marks

ATTACK = (
    "</script><script>window.hit=1</script><img src=x onerror='window.hit=1'>"
    "<svg onload='window.hit=1'>{{7*7}}<!--"
)


def action(name, **arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
    }


def pair(state_id, chosen, rejected, **more):
    return {
        "pair_id": f"p_{state_id}",
        "state_id": state_id,
        "session_id": "session",
        "state_messages": [
            {"role": "user", "content": f"Fix the cart. {ATTACK}"},
            {"role": "tool", "content": ATTACK},
        ],
        "chosen": "chosen",
        "rejected": "rejected",
        "chosen_action": chosen,
        "rejected_action": rejected,
        "n_teachers_agreeing": 2,
        "n_teachers_asked": 3,
        "agreement_level": "effect",
        "source": "consensus",
        "teachers_agreeing": ["deepseek", "qwen"],
        "p_better": 0.9,
        "weight": 0.9,
        "outcome": "ok",
        **more,
    }


PAIRS = [
    pair("s1", action("Read", file_path="a.py"), action("Bash", command="make")),
    pair(
        "s2",
        action("Edit", file_path="a.py", old_string="x = 1\ny = 1", new_string="x = 2\ny = 1"),
        action("Edit", file_path="a.py", old_string="x = 1\ny = 1", new_string="x = 3\ny = 1"),
        agreement_level="exact",
        teachers_agreeing=["glm", "qwen"],
    ),
    pair("s3", action("Bash", command=ATTACK), action("Bash", command="ls"), hint=ATTACK),
    pair(
        "s4",
        action("Bash", command="pytest"),
        action("Bash", command="tox"),
        source="rewind",
        n_teachers_agreeing=0,
        teachers_agreeing=[],
        p_better=0.6,
    ),
]
OUTCOMES = [
    *({"state_id": f"s{n}", "outcome": "pair"} for n in range(1, 5)),
    {"state_id": "s5", "outcome": "no_consensus", "near_level": "target", "n_valid": 3},
]

TRIALS = {
    "chosen": {
        "result": "works, check fixed",
        "diff": f"--- a.py\n+++ a.py\n-x = 1\n+x = 2 {ATTACK}",
    },
    "rejected": {"result": "fails: not_found", "answer": f"File does not exist. {ATTACK}"},
}


def write_pairs(pairs, folder: Path, outcomes=(), title: str = "All pairs") -> str:
    shown = portion(title, pairs, outcomes, results={"s2": {"trials_json": json.dumps(TRIALS)}})
    write_page(Contents(sessions=(), pairs=[shown]), to=folder)
    return f"{(folder / 'index.html').as_uri()}#/pairs"


@pytest.fixture
def pairs():
    return PAIRS


@pytest.fixture(params=[1280, 400])
def page(browser, tmp_path: Path, request, pairs):
    url = write_pairs(pairs, tmp_path / "look", OUTCOMES, ATTACK)
    context = browser.new_context(viewport={"width": request.param, "height": 800})
    opened = context.new_page()
    problems: list[str] = []
    requests: list[str] = []
    opened.on("console", lambda message: problems.append(message.text))
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("request", lambda one: requests.append(one.url))
    opened.goto(url)
    opened.locator("#list button").first.wait_for()
    yield opened
    assert opened.evaluate("window.hit") is None
    assert problems == []
    assert [url for url in requests if not url.startswith(("file:", "blob:"))] == []
    context.close()


def shown(page: Page) -> list[str]:
    return page.locator("#list .head").all_text_contents()


def current(page: Page) -> str:
    return page.locator("#detail h2").inner_text()


def choose(page: Page, name: str, value: str) -> None:
    page.locator("#filters").evaluate("filters => { filters.open = true }")
    page.locator(f"[data-filter={name}]").select_option(value)


def test_page_opens_on_the_pair_most_worth_a_look_and_fits_its_width(page: Page):
    assert current(page) == "s4"
    assert len(shown(page)) == 4
    assert page.locator("#counts").inner_text() == "States by outcome: 4 pair · 1 no consensus"
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(overflow) == 0
    for name in ("accept", "reject", "export"):
        box = page.locator(f"#{name}").bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= page.viewport_size["width"]


def test_both_sides_show_what_they_did_to_the_files(page: Page):
    assert page.locator(".tried").count() == 0
    page.locator("#list button", has_text="a.py").nth(1).click()
    assert current(page) == "s2"
    told = page.locator(".tried strong").all_text_contents()
    assert told == ["Rejected: fails: not_found", "Chosen: works, check fixed"]
    expect(page.locator(".tried .difference .in")).to_have_text(f"+x = 2 {ATTACK}")
    expect(page.locator(".tried .difference .out")).to_have_text("-x = 1")
    expect(page.locator(".tried .rejected pre")).to_contain_text("File does not exist.")


def test_marks_are_exported_and_read_back(page: Page, tmp_path: Path):
    page.keyboard.press("a")
    assert current(page) == "s1"
    page.locator("#reject").click()
    page.keyboard.press("r")
    page.keyboard.press("k")
    page.keyboard.press("u")
    assert page.locator("#progress").inner_text() == "2 of 4 pairs marked"
    choose(page, "mark", "accept")
    assert shown(page) == ["Bash pytest"]
    with page.expect_download() as download:
        page.locator("#export").click()
    exported = tmp_path / "marks.json"
    download.value.save_as(exported)
    assert read_marks(exported) == {"p_s4": "accept", "p_s1": "reject"}


@pytest.mark.parametrize(
    "pairs",
    [
        [
            *PAIRS,
            pair(
                "s2",
                action("Bash", command="pytest"),
                action("Bash", command="rm x"),
                pair_id="p_s2_other",
                source="rejection",
                n_teachers_agreeing=0,
                teachers_agreeing=[],
            ),
        ]
    ],
)
def test_a_mark_is_for_one_pair_of_a_state_and_every_count_says_so(page: Page):
    counts = page.locator("#n-shown"), page.locator("#progress")
    assert [count.inner_text() for count in counts] == [
        "5 of 5 pairs, 0 of 1 states without one",
        "0 of 5 pairs marked",
    ]
    page.locator("#list button").filter(has_text="Edit a.py").click()
    assert current(page) == "s2"
    page.keyboard.press("r")
    assert page.locator("#progress").inner_text() == "1 of 5 pairs marked"
    assert page.locator("#list [data-mark=reject]").count() == 1
    choose(page, "outcome", "")
    assert page.locator("#n-shown").inner_text() == "5 of 5 pairs, 1 of 1 states without one"
    choose(page, "mark", "reject")
    assert page.locator("#n-shown").inner_text() == "1 of 5 pairs, 0 of 1 states without one"
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(overflow) == 0
