"""The page of `look` in a real headless browser: a session opens as a tree, and nothing runs."""

import json

from playwright.sync_api import expect
from replay_pipeline.look import look
from replay_pipeline.review import write_review

from replay_pipeline.ingesters import ingest
from replay_pipeline.testing.sample import SESSIONS_DIR

ATTACK = "</script><script>window.hit=1</script><img src=x onerror='window.hit=1'>"


def test_a_tree_with_a_rewind_and_one_with_a_subagent_open_by_clicks(opened, tmp_path):
    page_file = tmp_path / "look.html"
    look([SESSIONS_DIR], page=page_file)
    page = opened(page_file.as_uri())
    expect(page.locator("#totals")).to_contain_text("2 of subagents")
    rows = page.locator("#sessions tbody tr")
    column = 7
    rewound = next(
        n for n in range(rows.count()) if rows.nth(n).locator("td").nth(column).inner_text() != "0"
    )
    rows.nth(rewound).locator("button").click()
    folded = page.locator("details.branch").first
    before = page.locator(".turn").count()
    folded.locator("summary").first.click()
    expect(folded.locator(".turn").first).to_be_visible()
    assert page.locator(".turn").count() > before
    page.locator("#search").fill(".agent-")
    rows.first.locator("button").click()
    expect(page.locator("article")).to_contain_text("a subagent of")
    page.locator("article p button").first.click()
    expect(page.locator("article")).to_contain_text("subagent: ")
    expect(page.locator(".turn.decision").first).to_be_visible()


def test_hostile_text_does_nothing_in_the_tree(opened, tmp_path):
    row = {
        "type": "user", "uuid": "u", "parentUuid": None, "sessionId": "s", "version": "2.1.0",
        "cwd": f"/{ATTACK}", "timestamp": "2026-01-01T00:00:00.000Z", "isSidechain": False,
        "userType": "external", "message": {"role": "user", "content": ATTACK},
    }  # fmt: skip
    answer = {
        "id": "m", "type": "message", "role": "assistant", "model": ATTACK,
        "content": [{"type": "text", "text": ATTACK}], "usage": {"output_tokens": 1},
    }  # fmt: skip
    rows = [row, {**row, "type": "assistant", "uuid": "a", "parentUuid": "u", "message": answer}]
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    look([tmp_path], page=tmp_path / "look.html")
    page = opened((tmp_path / "look.html").as_uri())
    page.locator("#sessions tbody button").first.click()
    expect(page.locator("article")).to_contain_text("onerror")
    assert page.evaluate("window.hit") is None
    assert page.locator("img").count() == 0


def test_a_decision_leads_to_its_pair_and_the_pair_back_to_its_session(opened, tmp_path):
    page_file, review_file = tmp_path / "look.html", tmp_path / "data" / "review.html"
    result = ingest([SESSIONS_DIR])
    states = [s for s in result.states.to_pylist() if s["siblings"]] or result.states.to_pylist()
    state = states[0]
    pair = {
        "state_id": state["state_id"], "session_id": state["session_id"], "chosen": "a",
        "rejected": "b", "n_teachers_agreeing": 2, "state_messages": [],
    }  # fmt: skip
    other = {**pair, "state_id": "another", "pair_id": "p_other", "chosen": "c"}
    review_file.parent.mkdir()
    look([SESSIONS_DIR], page=page_file, review=review_file)
    write_review([other, pair], path=review_file, look=page_file)
    page = opened(f"{page_file.as_uri()}#{state['session_id']}/{state['state_id']}")
    turn = page.locator(".turn.linked")
    expect(turn).to_contain_text(state["state_id"])
    turn.get_by_role("link", name="its pair").click()
    expect(page.locator("#detail h2")).to_have_text(state["state_id"])
    page.get_by_role("link", name="see it in its session").click()
    expect(page.locator(".turn.linked")).to_contain_text(state["state_id"])
