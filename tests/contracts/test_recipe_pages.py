"""Every script of a recipe's page is run by `make test-recipes`, or the page says what it needs besides."""

import pytest

from tests.recipes.pages import NEEDS, PAGES, blocks, missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_a_page_has_scripts_and_says_what_they_need(page):
    found = blocks(page)
    assert found, f"{page}: no script in a block of bash"
    for block in found:
        assert block.needs <= NEEDS, block.needs - NEEDS
        assert "org/pairs" not in block.script or block.needs, block.script


def test_expected_lines_are_compared_with_their_figures():
    said = "start\n3 channels live, loss fell by 99.0 % in 74 steps\nPASS in 4 s"
    assert missing(("3 channels live, loss fell by 98.1 % in 70 steps", "PASS"), said) == []
    assert missing(("loss fell by 80.0 %",), said) == ["loss fell by 80.0 %"]
    assert missing(("2 channels dead",), said) == ["2 channels dead"]
    assert missing(("PASS", "3 channels live"), said) == ["3 channels live"], "their order counts"
    assert missing(('"right": 0.77,',), '{"right": 0.7692, "steps": 3}') == []
    assert missing(('"right": 0.77,',), '{"right": 0.6, "steps": 3}') == ['"right": 0.77,']
