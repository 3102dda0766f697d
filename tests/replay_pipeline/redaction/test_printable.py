import pytest

from replay_pipeline.redaction.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text", "plain text"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("of\r\nWindows", "of\nWindows"),
        ("\u00e9\u4f60", "\u00e9\u4f60"),
        ("\U0001f469\u200d\U0001f4bb", "\U0001f469\u200d\U0001f4bb"),
        ("\x1b[2Jgone", "\ufffd[2Jgone"),
        ("\u202eturned\r", "\ufffdturned\ufffd"),
        ("a\u00a0b\u3000c\u202fd\u2007e", "a b c d e"),
    ],
)
def test_a_control_character_becomes_a_mark_and_everything_else_stays(text, shown):
    assert printable(text) == shown
