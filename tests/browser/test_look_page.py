"""The page of `look` in a real headless browser: what a stranger asks, from disk, and nothing runs."""

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from replay_pipeline.stages.pages.look import look
from replay_pipeline.testing.sample import SESSIONS_DIR
from tests.replay_pipeline.ingesters.logs import Log

OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"

ALL = re.compile(r"^(\d+) of \1 sessions")
"""What is said where no session is left out."""


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("logs") / "look"
    look([SESSIONS_DIR], to=folder)
    return (folder / "index.html").as_uri()


@pytest.fixture(scope="module")
def root(demo) -> str:
    return (demo / "look" / "index.html").as_uri()


def at(page: Page, url: str) -> None:
    page.goto("about:blank")
    page.goto(url)
    page.locator("html[data-ready]").wait_for(state="attached")


class Clicks:
    """Counts what a person does on a page."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.n = 0

    def click(self, role: str, name: str | re.Pattern[str]) -> None:
        self.n += 1
        self.page.get_by_role(role, name=name).first.click()

    def choose(self, label: str, value: str) -> None:
        self.n += 1
        self.page.get_by_label(label).first.select_option(value)

    def open(self, text: str) -> None:
        self.n += 1
        self.page.locator("summary", has_text=text).first.click()


def dearest_last_week(do: Clicks) -> None:
    do.click("link", "Sessions")
    do.choose("Date", "7")
    do.click("button", "Cost")
    costs = [float(c[1:].split()[0]) for c in do.page.locator("td.cost").all_inner_texts()]
    assert costs == sorted(costs, reverse=True)
    assert costs
    expect(do.page.get_by_role("status")).not_to_contain_text(ALL)


def where_did_it_rewind(do: Clicks) -> None:
    do.click("link", "Sessions")
    do.choose("Outcome", "rewound")
    do.n += 1
    do.page.locator("td.title", has_text="rewind").locator("a").first.click()
    expect(do.page.locator("details.branch").first).to_be_visible()


def which_tool_fails_most(do: Clicks) -> None:
    card = do.page.locator(
        "section", has=do.page.get_by_role("heading", name="Tools that fail most")
    )
    failed = [int(row.locator("td").nth(2).inner_text()) for row in card.locator("tbody tr").all()]
    assert failed == sorted(failed, reverse=True)
    assert failed[0] > 0


def what_would_glm_have_done_at_this_edit(do: Clicks) -> None:
    do.click("link", "Sessions")
    do.choose("Tool", "Edit")
    do.n += 1
    do.page.locator("td.title a").first.click()
    edit = do.page.locator(".turn.decision", has=do.page.locator(".call h3", has_text="Edit")).first
    edit.locator(".answers summary").evaluate("fold => fold.parentElement.open = true")
    expect(edit.locator(".answers h3", has_text="glm").first).to_contain_text("action")


def what_would_last_month_have_cost_with_it(do: Clicks) -> None:
    do.click("link", "Teachers")
    heads = do.page.locator("table").first.locator("th").all_inner_texts()
    place = heads.index("last 30 days with it")
    glm = do.page.locator("tbody tr", has_text="glm").first.locator("td").nth(place).inner_text()
    assert re.fullmatch(r"\$\d+\.\d\d", glm)


def what_did_it_cost_and_what_came_from_cache(do: Clicks) -> None:
    expect(do.page.locator(".figures")).to_contain_text("$3.23")
    expect(do.page.locator(".figures")).to_contain_text("99 %of prompt tokens read from cache")
    assert do.page.locator(".figure").count() == 5


def which_project_costs_most(do: Clicks) -> None:
    card = do.page.locator("section", has=do.page.get_by_role("heading", name="Projects"))
    costs = [float(c.inner_text()[1:]) for c in card.locator("tbody td:nth-child(3)").all()]
    assert costs == sorted(costs, reverse=True)


def where_is_this_word(do: Clicks) -> None:
    do.click("link", "Sessions")
    expect(do.page.get_by_role("status")).to_contain_text(ALL)
    do.n += 1
    do.page.locator("#search").fill("notice")
    expect(do.page.get_by_role("status")).not_to_contain_text(ALL)
    do.n += 1
    do.page.locator("td.title a").first.click()
    expect(do.page.locator("mark").first).to_have_text(re.compile("notice", re.IGNORECASE))


def which_pairs_shall_i_mark(do: Clicks) -> None:
    do.click("link", "Pairs")
    expect(do.page.locator("#progress")).to_have_text("0 of 40 pairs marked")


def is_the_model_better_than_before(do: Clicks) -> None:
    do.click("link", "Training")
    expect(do.page.locator("main")).to_contain_text("before); without the prompt in")
    expect(do.page.locator(".figure strong").first).to_have_text(re.compile(r"\d+ % → \d+ %"))
    do.open("All figures")
    row = do.page.locator("tr", has_text="takes the teachers' action by itself")
    assert len(re.findall(r"\d+ %", row.inner_text())) == 4
    expect(do.page.get_by_role("heading", name="the model after").first).to_be_visible()


QUESTIONS: list[Callable[[Clicks], None]] = [
    dearest_last_week, where_did_it_rewind, which_tool_fails_most,
    what_would_glm_have_done_at_this_edit, what_would_last_month_have_cost_with_it,
    what_did_it_cost_and_what_came_from_cache, which_project_costs_most, where_is_this_word,
    which_pairs_shall_i_mark, is_the_model_better_than_before,
]  # fmt: skip


@pytest.mark.parametrize("ask", QUESTIONS, ids=lambda ask: ask.__name__)
def test_a_strangers_question_is_answered_in_three_clicks(opened, root, ask):
    page = opened(root)
    page.locator(".figure").first.wait_for()
    do = Clicks(page)
    ask(do)
    assert do.n <= 3


def test_every_view_has_an_address_and_back_goes_to_the_one_before(opened, root):
    page = opened(root)
    page.get_by_role("link", name="Sessions").last.click()
    page.get_by_label("Outcome").select_option("error")
    expect(page).to_have_url(re.compile("happened=error"))
    page.locator("td.title a").first.click()
    expect(page.locator(".turn.decision").first).to_be_visible()
    decision = page.locator(".turn.decision .what a", has_text="decision").nth(1)
    href = decision.get_attribute("href")
    decision.click()
    expect(page.locator(".turn.linked")).to_have_count(1)
    page.go_back()
    page.go_back()
    expect(page.get_by_label("Outcome")).to_have_value("error")
    at(page, root + href)
    linked = page.locator(".turn.linked")
    expect(linked).to_have_attribute("data-state", href.rsplit("/", 1)[1])


def test_a_decision_leads_to_its_pair_and_the_pair_back_to_its_session(opened, root):
    page = opened(f"{root}#/pairs/1")
    page.get_by_role("link", name="see it in its session").click()
    turn = page.locator(".turn.linked")
    state = turn.get_attribute("data-state")
    turn.get_by_role("link", name="its pair").click()
    expect(page.locator("#detail h2")).to_have_text(state)


def test_a_tree_with_a_rewind_and_one_with_a_subagent_open_by_clicks(opened, logs):
    page = opened(f"{logs}#/sessions?happened=rewound")
    page.locator("td.title a").first.click()
    folded = page.locator("details.branch").first
    before = page.locator(".turn").count()
    folded.locator("summary").first.click()
    expect(folded.locator(".turn").first).to_be_visible()
    assert page.locator(".turn").count() > before
    at(page, f"{logs}#/sessions?happened=subagent")
    page.locator("td.title a").first.click()
    expect(page.locator(".head")).to_contain_text("A subagent of")
    page.locator(".head a").first.click()
    expect(page.locator(".head")).to_contain_text("1 subagent")
    expect(page.locator(".turn.decision").first).to_be_visible()


TABS = ("overview", "sessions", "teachers", "pairs", "dataset", "training")


@pytest.mark.parametrize("width", [390, 1280, 2560])
def test_no_tab_scrolls_sideways_and_a_session_shows_title_date_and_cost(opened, root, width):
    page = opened(root, width=width)
    for tab in TABS:
        at(page, f"{root}#/{tab}")
        assert page.evaluate(OVERFLOW) == 0, tab
        if tab == "sessions":
            for name in ("title", "date", "cost"):
                box = page.locator(f"tbody td.{name}").first.bounding_box()
                assert box is not None
                assert box["x"] >= 0
                assert box["x"] + box["width"] <= width
    at(page, f"{root}#/sessions")
    page.locator("td.title a").first.click()
    page.locator(".turn").first.wait_for()
    assert page.evaluate(OVERFLOW) == 0


def test_a_bar_leads_to_sessions_that_add_up_to_it_and_an_empty_search_says_so(opened, logs):
    page = opened(logs)
    page.locator("summary", has_text="The same as a table").click()
    row = page.locator("section.wide details tbody tr").first
    cost = row.locator("td").nth(1).inner_text()
    row.locator("a").click()
    expect(page.get_by_role("status")).to_contain_text(cost)
    page.go_back()
    bar = page.locator(".chart .act").first
    *_, cost = (bar.locator("title").text_content() or "").split()
    bar.click()
    expect(page.get_by_role("status")).to_contain_text(cost)
    page.get_by_role("link", name="Sessions").last.click()
    page.locator("#search").fill("nowhere-to-be-found")
    expect(page.locator("main")).to_contain_text("No session has “nowhere-to-be-found”")


def test_what_is_found_is_shown_in_any_script_and_markdown_is_rendered(opened, tmp_path):
    log = Log("one", cwd="/src/shop")
    log.user("東京タワーへ行く道を教えてください。")
    said = "Take **line 2**.\n\n<img src=x onerror=alert(1)>\n\n| stop | next |\n|--|--|\n| 赤羽橋 | [x](http://a.example) |"
    log.says("m1", said)
    look([log.write(tmp_path)], to=tmp_path / "look")
    page = opened(f"{(tmp_path / 'look' / 'index.html').as_uri()}#/sessions")
    page.locator("#search").fill("羽橋")
    expect(page.locator(".snippet mark")).to_have_text("羽橋")
    page.locator("#search").fill("タワー")
    page.locator("td.title a").click()
    expect(page.locator(".turn.user mark")).to_have_text("タワー")
    answer = page.locator(".said.assistant")
    expect(answer.locator("strong")).to_have_text("line 2")
    expect(answer.locator("td").nth(1)).to_have_text("[x](http://a.example)")
    expect(answer).to_contain_text("<img src=x onerror=alert(1)>")
    assert answer.locator("a, img").count() == 0
    page.get_by_role("link", name="Sessions").last.click()
    page.locator("#search").fill("")
    page.locator("td.title a").click()
    expect(answer.locator("strong")).to_have_text("line 2")  # rendered once it is near the screen


def test_the_outline_leads_to_requests_and_a_call_to_its_subagent(opened, logs):
    page = opened(f"{logs}#/sessions?happened=subagent")
    page.locator("td.title a").first.click()
    page.get_by_text("A subagent of").locator("a").click()
    expect(page.locator(".outline .chart polyline").first).to_be_visible()
    page.locator(".outline .jump").last.click()
    page.locator("a", has_text="its subagent:").first.click()
    expect(page.locator(".head")).to_contain_text("A subagent of")


def test_the_policy_lets_no_other_script_and_no_request_through(opened, logs):
    page = opened(logs)
    page.locator(".figure").first.wait_for()
    page.evaluate(
        """() => { document.body.insertAdjacentHTML('beforeend', '<img src=x onerror="window.hit=1">');
        const link = document.createElement('link'); link.rel = 'stylesheet';
        link.href = 'data:text/css,body{display:none}'; document.head.append(link); }"""
    )
    page.wait_for_timeout(200)
    assert page.evaluate("window.hit") is None
    expect(page.locator("body")).to_be_visible()
    refused = page.evaluate("fetch('data:text/plain,x').then(() => false, () => true)")
    assert refused
