"""The documentation is plain English, and answers what a newcomer asks."""

import re
from pathlib import Path

import typer
from typer.testing import CliRunner

from replay_pipeline.cli import app
from tools.prose import Page, pages

REPO = Path(__file__).parents[2]
QUESTION = re.compile(r"^\*\*([^*]+\?)\*\* (.*?)(?=^\*\*|^## |\Z)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"`", "", h)).strip().lower().replace(" ", "-")
        for h in headings
    }


def test_twenty_questions_are_answered_within_two_clicks_of_the_readme():
    page = REPO / "docs" / "questions.md"
    assert "(docs/questions.md)" in (REPO / "README.md").read_text("utf-8")
    asked = QUESTION.findall(page.read_text("utf-8"))
    assert len(asked) >= 20
    for question, answer in asked:
        links = LINK.findall(answer)
        assert links, f"{question} leads nowhere"
        for path, anchor in links:
            target = (page.parent / path).resolve() if path else page
            assert target.is_file(), f"{question} {path}"
            assert not anchor or anchor in anchors(target), f"{question} {path}#{anchor}"


def test_help_names_a_type_only_where_a_value_is_written():
    program = typer.main.get_command(app)
    for name, command in [("", program), *program.commands.items()]:
        page = CliRunner().invoke(app, [*([name] if name else []), "--help"]).output
        assert "--help" in page, name
        assert "<bool>" not in page, name
        assert "list[" not in page, name
        assert command.help, name


def test_pages_keep_to_short_sentences_the_active_voice_and_the_word_list():
    findings = [finding for page in pages() for finding in page.findings()]
    assert not findings, "\n".join(findings)


def test_a_long_passive_or_foreign_sentence_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("The colour was chosen by the team whilst it rained. " * 30, "utf-8")
    found = "\n".join(Page(page).findings())
    assert "passive" in found
    assert "'colour'" in found
    assert "'whilst'" in found
    page.write_text(
        "You run the command, " * 20 + "and it ends. " * 1 + "It ends well now. " * 25, "utf-8"
    )
    assert Page(page).passive_share == 0
