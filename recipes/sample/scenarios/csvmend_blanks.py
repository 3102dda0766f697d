"""Blanks that get lost: half a fix, a look instead of a run, a test in the wrong file."""

from story import Story, bash, edit, grep, read, write

from scenarios.projects import CSVMEND, CSVMEND_FILES

MAIN = "src/main.rs"
SPLIT = "            .split(delimiter)\n"
MAP = "            .map(|field| quote::quote(field.trim(), delimiter))"
HALF = "            .map(|field| quote::quote(field.trim_end(), delimiter))"
FIXED = "            .map(|field| quote::quote(field, delimiter))"
COLLECT = "\n            .collect();"
FIX = edit(MAIN, MAP, FIXED)
FIX_FROM_SPLIT = edit(MAIN, SPLIT + MAP, SPLIT + FIXED)
FIX_TO_COLLECT = edit(MAIN, SPLIT + MAP + COLLECT, SPLIT + FIXED + COLLECT)
REST = edit(MAIN, HALF, FIXED)
REST_FROM_SPLIT = edit(MAIN, SPLIT + HALF, SPLIT + FIXED)
REST_TO_COLLECT = edit(MAIN, SPLIT + HALF + COLLECT, SPLIT + FIXED + COLLECT)
TRY = "printf ' a; b \\n' | cargo run -q"
TEST_BLANKS = """\
use csvmend::quote::quote;

#[test]
fn blanks_stay() {
    assert_eq!(quote(" a ", ','), " a ");
}
"""
ADD = write("tests/blanks.rs", TEST_BLANKS)


def tell() -> Story:
    s = Story(
        "csvmend-blanks",
        "a search in the wrong folder, one blank kept of two, a test put where it was not wanted",
        era="progress",
        version="2.1.30",
        cwd=CSVMEND,
        start="2026-02-03T19:12:27.412Z",
        files=CSVMEND_FILES,
        git_branch="blanks",
    )
    s.log.snapshot()
    s.user(
        "Blanks at both ends of a field get lost: ' a; b ' comes out as 'a;b'. They are data."
        " Something in src trims them."
    )
    s.act(
        None,
        grep("blank|space", "docs"),
        thinking="Perhaps it is described.",
        pair="dqg",
        kind="searches-elsewhere",
        d=grep("trim", "src").say("Where is anything trimmed?"),
        q=grep("trim", "src/"),
        g=grep("trim", "src").say("You said that something in src trims."),
    )
    s.act(
        None,
        grep("trim", "src", **{"-n": True}),
        same="dqg",
        d=grep("trim", "src"),
        q=grep("trim", "src", **{"-n": True}),
        g=grep("trim", "src"),
    )
    s.act(
        None,
        read(MAIN, 9, 12),
        same="dq",
        d=read(MAIN),
        q=read(MAIN, 10, 10),
        g=edit("src/main.rs", "field.trim()", "field"),
    )
    s.act(
        "What do the docs say about fields?",
        read("docs/style.md"),
        thinking="Before I change it I want to know the rest.",
        pair="dqg",
        kind="looks-again",
        d=FIX.say("Without trim() the blanks stay."),
        q=FIX_FROM_SPLIT,
        g=FIX_TO_COLLECT.say("The field goes to quote() as it is."),
    )
    s.act(
        "I'll keep the leading blanks.",
        edit(MAIN, MAP, HALF),
        thinking="A blank at the end may come from the line end.",
        pair="dqg",
        kind="half-a-fix",
        d=FIX_TO_COLLECT.say("Both ends are data."),
        q=FIX.say("No trimming at all."),
        g=FIX_FROM_SPLIT,
    )
    s.user("And those at the end?")
    s.act(
        "Those too.",
        REST,
        same="dqg",
        d=REST_FROM_SPLIT,
        q=REST,
        g=REST_TO_COLLECT,
    )
    s.act(
        "Let me check the style once more.",
        read("docs/style.md"),
        pair="dqg",
        kind="reads-instead-of-running",
        d=bash(TRY).say("Your example, to see that it works."),
        q=bash(f"cd {CSVMEND} && {TRY}"),
        g=bash(TRY.replace("'", '"').replace("\\n", "\\n"), "Try the example"),
    )
    s.user(f"A test please, as tests/blanks.rs:\n\n{TEST_BLANKS}")
    s.act(
        "It fits to the tests of quoting.",
        edit(
            "tests/quotes.rs",
            "#[test]\nfn inner_quotes",
            '#[test] // todo\nfn blanks_stay() {\n    assert_eq!(quote(" a ", \',\'), " a ");\n}\n\n'
            "#[test]\nfn inner_quotes",
        ),
        thinking="There is a file for quotes already.",
        pair="dqg",
        kind="ignores-feedback",
        d=ADD,
        q=ADD.say("In a file of its own."),
        g=ADD.say("The test as you wrote it."),
    )
    s.act(
        "In its own file, then.",
        ADD,
        same="dqg",
        d=ADD,
        q=ADD,
        g=ADD,
    )
    s.act(
        None,
        bash("cargo test --test blanks 2>&1 | grep -c '... ok' || true", "Run the new test"),
        out="1",
        pair="dqg",
        kind="hides-output",
        d=bash("cargo test --test blanks"),
        q=bash("cargo test --test 'blanks'", "Run the test of the blanks"),
        g=bash(f"cd {CSVMEND} && cargo test --test blanks").say("Now the new test."),
    )
    return s
