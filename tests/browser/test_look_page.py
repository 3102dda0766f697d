"""The page of `look` in a real headless browser: what a stranger asks, from disk, and nothing runs."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from replay_pipeline.pages import look
from replay_pipeline.testing.sample import SESSIONS_DIR
from tests.hostile import HOSTILE, MARK, REMOTE

OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


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
    page.wait_for_function("document.documentElement.dataset.ready !== undefined")


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
    assert 0 < len(costs) < 23


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
    expect(do.page.locator(".figures")).to_contain_text("$2.9")
    expect(do.page.locator(".figures")).to_contain_text("99 %of prompt tokens read from cache")
    assert do.page.locator(".figure").count() == 5


def which_project_costs_most(do: Clicks) -> None:
    card = do.page.locator("section", has=do.page.get_by_role("heading", name="Projects"))
    costs = [float(c.inner_text()[1:]) for c in card.locator("tbody td:nth-child(3)").all()]
    assert costs == sorted(costs, reverse=True)


def where_is_this_word(do: Clicks) -> None:
    do.click("link", "Sessions")
    do.n += 1
    do.page.locator("#search").fill("notice")
    expect(do.page.get_by_role("status")).not_to_contain_text("23 of 23")
    do.n += 1
    do.page.locator("td.title a").first.click()
    expect(do.page.locator("mark").first).to_have_text(re.compile("notice", re.IGNORECASE))


def which_pairs_shall_i_mark(do: Clicks) -> None:
    do.click("link", "Pairs")
    expect(do.page.locator("#progress")).to_have_text("0 of 40 pairs marked")


def is_the_model_better_than_before(do: Clicks) -> None:
    do.click("link", "Training")
    expect(do.page.locator("main")).to_contain_text("before); without the prompt in")
    row = do.page.locator("tr", has_text="takes the consensus action")
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


def test_keys_lead_through_the_tabs_and_the_decisions(opened, root):
    page = opened(root)
    page.locator(".figure").first.wait_for()
    for key, tab in (("2", "Sessions"), ("3", "Teachers"), ("6", "Training"), ("2", "Sessions")):
        page.keyboard.press(key)
        expect(page.locator("#tabs [aria-current=page]")).to_have_text(tab)
    page.locator("td.title a").first.wait_for()
    page.keyboard.press("/")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.press("Escape")
    page.locator("td.title a").first.click()
    page.locator(".turn.decision").first.wait_for()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    linked = page.locator(".turn.linked").get_attribute("data-state")
    assert linked == page.locator(".turn.decision").first.get_attribute("data-state")
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_visible()


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


def test_one_file_shows_the_same_without_the_folder(opened, tmp_path):
    look([SESSIONS_DIR], to=tmp_path / "page.html", is_single_file=True)
    page = opened((tmp_path / "page.html").as_uri())
    expect(page.locator(".chart canvas").first).to_be_visible()
    page.get_by_role("link", name="Sessions").last.click()
    page.locator("#search").fill("notice")
    expect(page.get_by_role("status")).not_to_contain_text("23 of 23")
    page.locator("td.title a").first.click()
    expect(page.locator(".turn.decision").first).to_be_visible()


def hostile_log(folder: Path) -> Path:
    rows, parent = [], None
    for n, text in enumerate(HOSTILE):
        row = {
            "type": "user", "uuid": f"u{n}", "parentUuid": parent, "sessionId": "s", "version": "2.1.0",
            "cwd": f"/{text}", "timestamp": "2026-01-01T00:00:00.000Z", "isSidechain": False,
            "userType": "external", "message": {"role": "user", "content": text},
        }  # fmt: skip
        call = {
            "type": "tool_use",
            "id": f"t{n}",
            "name": text[:60],
            "input": {text[:40]: text, "old_string": text, "new_string": text[::-1]},
        }
        answer = {
            "id": f"m{n}", "type": "message", "role": "assistant", "model": text, "stop_reason": "tool_use",
            "content": [{"type": "thinking", "thinking": text}, {"type": "text", "text": text}, call],
            "usage": {"output_tokens": 1},
        }  # fmt: skip
        rows += [
            row,
            {**row, "type": "assistant", "uuid": f"a{n}", "parentUuid": f"u{n}", "message": answer},
        ]
        parent = f"a{n}"
    rows.append({"type": "summary", "summary": HOSTILE[0], "leafUuid": parent})
    path = folder / "s.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def test_hostile_text_does_nothing_on_any_tab(opened, tmp_path):
    look([hostile_log(tmp_path)], to=tmp_path / "look")
    url = (tmp_path / "look" / "index.html").as_uri()
    page = opened(url)
    asked = []
    page.on("request", lambda one: REMOTE in one.url and asked.append(one.url))
    for tab in ("overview", "sessions"):
        at(page, f"{url}#/{tab}")
        assert page.locator("main img, main script, main iframe, main form").count() == 0
    page.locator("td.title a").first.click()
    page.locator(".turn.decision").first.wait_for()
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    page.wait_for_timeout(300)
    assert page.locator("main img, main script, main iframe, main form, main svg").count() == 0
    assert page.evaluate(f"{MARK} === undefined")
    assert asked == []
    assert page.evaluate(OVERFLOW) == 0
    inside = page.locator("main a").evaluate_all("all => all.map(a => a.getAttribute('href'))")
    assert all(href.startswith("#/") for href in inside)


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


def test_a_search_of_every_text_is_quick(opened, logs):
    page = opened(f"{logs}#/sessions")
    page.locator("td.title a").first.wait_for()
    before = time.perf_counter()
    page.locator("#search").fill("gate")
    expect(page.get_by_role("status")).not_to_contain_text("23 of 23")
    assert time.perf_counter() - before < 5  # a machine may be busy; `benchmarks/look.py` measures
