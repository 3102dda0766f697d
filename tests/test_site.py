"""The documentation as a site: it builds without a warning, and says what is."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_site_builds_strictly_and_asks_nobody(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "--quiet",
            "--config-file",
            "tools/mkdocs.yml",
            "--site-dir",
            str(tmp_path),
        ],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    pages = list(tmp_path.rglob("index.html"))
    assert len(pages) > 25
    for page in pages:
        loaded = re.findall(
            r"<(?:script|img|link[^>]+stylesheet)[^>]+(?:src|href)=[\"']?(https?://[^\"' >]+)",
            page.read_text("utf-8"),
        )
        assert not loaded, f"{page}: {loaded}"


def test_every_test_that_the_threat_model_names_exists():
    named = re.findall(
        r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (REPO / "docs/security.md").read_text("utf-8")
    )
    assert len(named) > 20
    for path, name in named:
        text = (REPO / path).read_text("utf-8")
        assert not name or re.search(rf"^(?:async )?def {name}\(", text, re.MULTILINE), (
            f"{path}::{name}"
        )


def pages_of_docs() -> set[str]:
    return {p.relative_to(REPO / "docs").as_posix() for p in (REPO / "docs").rglob("*.md")}


def test_at_most_twenty_pages_are_written_by_hand_beside_the_decisions():
    generated = {"cli.md", "settings.md", "tables.md"}
    by_hand = {name for name in pages_of_docs() - generated if not name.startswith("decisions/")}
    assert len(by_hand) <= 20, sorted(by_hand)


def test_every_page_is_in_the_navigation_once():
    text = (REPO / "tools/mkdocs.yml").read_text("utf-8")
    listed = re.findall(r"- ([\w/-]+\.md)$", text, re.MULTILINE)
    pages = pages_of_docs()
    assert len(listed) == len(set(listed))
    assert pages <= set(listed)


def test_every_variable_that_is_read_is_told():
    code = "".join(p.read_text("utf-8") for p in (REPO / "replay_pipeline").rglob("*.py"))
    page = (REPO / "docs" / "settings.md").read_text("utf-8")
    assert not {name for name in re.findall(r'"(REPLAY_[A-Z_]+)"', code) if f"`{name}`" not in page}


QUESTIONS = {
    "Which agents' logs can it read?": ("ingest.md#which-agents", "Codex"),
    "What did my sessions cost?": ("look.md#what-it-cost", "list prices"),
    "Could a cheaper model have done it?": ("look.md#which-model-could-you-have-used", "verdict"),
    "What leaves my machine?": ("security.md#what-leaves-your-machine", "nothing"),
    "How do secrets stay out?": ("security.md#keep-secrets-and-people-out", "<SECRET:"),
    "A secret was published: what now?": ("security.md#if-a-secret-got-out", "Revoke"),
    "How do I take a session back?": ("publish.md#taking-things-back", "retract"),
    "How do I set limits?": ("how-to/own-sessions.md#rehearse-estimate-pay", "max_nightly_usd"),
    "Can it spend more than my limit?": ("replay.md#limits", "ceiling"),
    "What is lost when it crashes?": ("replay.md#lost-calls", "in flight"),
    "Can teachers run on my machine?": ("how-to/own-sessions.md#use-local-teachers", "vllm"),
    "Why did a call fail?": ("replay.md#what-a-failed-call-looks-like", "rate_limited"),
    "What does this message mean?": ("questions.md#error-messages", "is not trusted"),
    "When are two actions the same?": ("agreement.md#four-levels", "exact"),
    "How likely is a pair right?": ("agreement.md#how-right-a-pair-is", "p_better"),
    "How do I mark pairs?": ("look.md#mark-pairs", "marks"),
    "How do I filter pairs my way?": ("normalize.md#a-recipe-of-your-own", "process:"),
    "How much memory does training take?": ("how-to/train-a-real-model.md#how-much-memory", "GB"),
    "Which loss should I choose?": ("losses.md#which-loss-to-choose", "dpo"),
    "How do I run it every night?": ("deploy.md#switch-the-night-on", "replays_at"),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_what_users_ask_is_answered_at_most_two_links_from_the_readme(question):
    place, words = QUESTIONS[question]
    name, _, anchor = place.partition("#")
    reached = {REPO / "README.md"}
    for _ in range(2):
        reached |= {linked for page in reached for linked in links(page)}
    page = REPO / "docs" / name
    assert page in reached
    assert words in sections(page)[anchor]


def links(page: Path) -> set[Path]:
    found = re.findall(r"\]\(([^()#:\s]+\.md)[#)]", page.read_text("utf-8"))
    return {(page.parent / each).resolve() for each in found}


def sections(page: Path) -> dict[str, str]:
    """The text below each heading, by the heading's anchor."""
    _, *parts = re.split(r"^##+ (.+)$", page.read_text("utf-8"), flags=re.MULTILINE)
    anchors = [re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in parts[::2]]
    return dict(zip(anchors, parts[1::2], strict=True))
