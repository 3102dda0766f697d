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
