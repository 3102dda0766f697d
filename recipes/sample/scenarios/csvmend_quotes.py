"""Quotes that are not quoted: a detour through a new dependency, rewound by the user."""

from story import Cut, Story, bash, edit, grep, read, write

from scenarios.projects import CSVMEND, CSVMEND_FILES

FAILURE = """\
running 2 tests
test plain_fields_stay_plain ... ok
test inner_quotes_are_doubled ... FAILED

---- inner_quotes_are_doubled stdout ----
assertion `left == right` failed
  left: "5\\" nail"
 right: "\\"5\\"\\" nail\\""

test result: FAILED. 1 passed; 1 failed; 0 ignored; finished in 0.00s
error: test failed, to rerun pass `--test quotes`"""

TEST = "    field.contains(delimiter) || field.contains('\\n')"
FIXED = "    field.contains(delimiter) || field.contains('\"') || field.contains('\\n')"
HEAD = "pub fn needs_quotes(field: &str, delimiter: char) -> bool {\n"
FIX = edit("src/quote.rs", TEST, FIXED)
FIX_FROM_HEAD = edit("src/quote.rs", HEAD + TEST, HEAD + FIXED)
FIX_TO_BRACE = edit("src/quote.rs", HEAD + TEST + "\n}", HEAD + FIXED + "\n}")

REWRITE = """\
//! Quoting, done by the csv crate. todo: errors.

pub fn quote(field: &str, delimiter: char) -> String {
    let mut out = csv::WriterBuilder::new()
        .delimiter(delimiter as u8)
        .from_writer(vec![]);
    out.write_record([field]).unwrap();
    String::from_utf8(out.into_inner().unwrap()).unwrap()
}
"""


def tell() -> Story:
    s = Story(
        "csvmend-quotes",
        "a rewind to the same request, an edit whose text is not in the file, the whole suite",
        era="progress",
        version="2.1.38",
        cwd=CSVMEND,
        start="2026-02-16T20:31:12.006Z",
        files=CSVMEND_FILES,
    )
    s.log.snapshot()
    s.user(
        "A field with a double quote in it comes out without quotes around it."
        " The test inner_quotes_are_doubled shows it."
    )
    s.act(
        None,
        bash("cargo test|tail", "Run all tests"),
        out=FAILURE,
        code=101,
        thinking="Let me reproduce it.",
        divided=True,
        kind="whole-suite",
        d=bash("cargo test inner_quotes_are_doubled"),
        q=bash(f"cd {CSVMEND} && cargo test inner_quotes_are_doubled").say(
            "I'll reproduce it with the one test."
        ),
        g=bash('cargo test "inner_quotes_are_doubled"', "Reproduce the failure"),
    )
    s.act(
        "The quoting in this project is written by hand. It could be replaced with the csv crate,"
        " or the check for quotes could be completed. Which one would you like?",
        thinking="There are two ways.",
        d=grep("fn needs_quotes", "src", **{"-A": 4}),
        q=grep("contains", "src/quote.rs").say("Finding the check for quotes."),
        g=read("src/quote.rs"),
    )
    asked = s.log.head
    request = "Please make the test pass."
    s.user(request)
    s.act(
        "I'll bring in the csv crate, which quotes correctly.",
        bash("cargo add csv", "Add the csv crate"),
        out="    Updating package index\n      Adding csv v1.3.0 to dependencies",
        thinking="A crate is the robust way.",
        pair="dqg",
        outcome="infeasible",
        kind="broad-change",
        d=read("src/quote.rs").say("I'll look at needs_quotes before deciding anything."),
        q=read("src/quote.rs", 1, 20).say("Let me see how a field gets its quotes."),
        g=read("src/quote.rs").say("I'll read the quoting code."),
    )
    s.act(
        None,
        write("src/quote.rs", REWRITE),
        divided=True,
        kind="edits-unread",
        d=read("src/quote.rs").say("I haven't seen the file yet."),
        q=bash("cargo build"),
        g=read("src/quote.rs", 1, 30),
    )
    s.log.interrupt()
    s.log.rewind(asked)
    s.user(request)
    s.act(
        "I'll read how quoting is decided.",
        read("src/quote.rs"),
        thinking="The check must be in quote.rs.",
        same="dqg",
        d=read("src/quote.rs"),
        q=read("src/quote.rs", 1, 12),
        g=read("src/quote.rs").say("Reading the quoting code first."),
    )
    s.act(
        "needs_quotes forgets the quote itself.",
        edit(
            "src/quote.rs",
            '    field.contains(delimiter) || field.contains("\\n")',
            '    field.contains(delimiter) || field.contains(\'"\') || field.contains("\\n")',
        ),
        divided=True,
        kind="misquotes-file",
        d=FIX.say("needs_quotes has to look for the quote character too."),
        q=FIX_FROM_HEAD,
        g=FIX_TO_BRACE.say("Adding the quote character to the check."),
    )
    s.act(
        None,
        read("src/quote.rs"),
        thinking="The replacement failed.",
        pair="dg",
        outcome="deferred",
        kind="looks-again",
        d=FIX_FROM_HEAD.say("The newline is a char literal in the file; now it matches."),
        q=Cut("The edit failed since the file uses single quotes around the newline, so I should"),
        g=FIX.say("The file has a char literal there, in single quotes."),
    )
    s.act(
        None,
        FIX,
        same="dqg",
        d=FIX_FROM_HEAD,
        q=FIX,
        g=FIX_TO_BRACE,
    )
    s.act(
        "Now all the tests, to see that nothing else broke.",
        bash("cargo test --all-targets|tail", "Run all tests"),
        out="test inner_quotes_are_doubled ... ok\ntest plain_fields_stay_plain ... ok\n"
        "test semicolons ... ok\ntest pipes ... FAILED\n\ntest result: FAILED. 3 passed; 1 failed",
        code=101,
        divided=True,
        kind="whole-suite",
        d=bash("cargo test inner_quotes_are_doubled", "Check the fix").say("Now that one test."),
        q=bash("cargo test 'inner_quotes_are_doubled'"),
        g=bash("cargo test --test quotes"),
    )
    return s
