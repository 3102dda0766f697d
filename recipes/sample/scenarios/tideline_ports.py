"""A new port: a search that was not needed, a dictionary turned over for one entry."""

from story import Story, bash, edit, grep, read

from scenarios.projects import CLOCK_FIXED, TIDELINE, TIDELINE_FILES

CLOCK = "tideline/clock.py"
TEST = "tests/test_clock.py"
EMBER = '"Port Ember": "America/Halifax"}'
BOTH = '"Port Ember": "America/Halifax", "Skerry Point": "Europe/Dublin"}'
ZONES = 'ZONES = {"Gullhaven": "Europe/Oslo", "Saltmouth": "Europe/London", '
OFFSETS = "\nSTANDARD_OFFSET = {"
ADD = edit(CLOCK, EMBER, BOTH)
ADD_WIDER = edit(CLOCK, ZONES + EMBER, ZONES + BOTH)
ADD_WIDEST = edit(CLOCK, ZONES + EMBER + OFFSETS, ZONES + BOTH + OFFSETS)
LAST = '    assert label(to_local("Gullhaven", at(12, 7, 4))) == "06:00"'
NEW = (
    "\n\n\ndef test_skerry_point():\n"
    '    assert label(to_local("Skerry Point", at(12, 7, 4))) == "05:00"'
)
SUMMER = "def test_summer_time():\n"
ADD_TEST = edit(TEST, LAST, LAST + NEW)
ADD_TEST_WIDER = edit(TEST, SUMMER + LAST, SUMMER + LAST + NEW)


def tell() -> Story:
    s = Story(
        "tideline-ports",
        "a search where the place was named, a whole table reordered for one entry, refused",
        era="attachment",
        version="2.1.262",
        cwd=TIDELINE,
        start="2026-10-05T07:31:44.280Z",
        files=TIDELINE_FILES | {CLOCK: CLOCK_FIXED},
        git_branch="skerry-point",
        model="claude-haiku-4-5-20251001",
    )
    s.log.bookkeeping("permission-mode", permissionMode="default")
    s.log.snapshot()
    s.user(f"Add a port to ZONES in {CLOCK}: Skerry Point, Europe/Dublin.")
    s.act(
        None,
        read(CLOCK, 1, 30),
        thinking="",
        same="dqg",
        d=read(CLOCK),
        q=read(CLOCK, 1, 12),
        g=read(CLOCK),
    )
    s.act(
        "Are ports documented?",
        grep("Gullhaven", "docs", **{"-n": True}),
        thinking="",
        pair="dqg",
        kind="looks-again",
        d=ADD.say("One more entry."),
        q=ADD_WIDER,
        g=ADD_WIDEST.say("Adding Skerry Point."),
    )
    message = s.act(
        "I'll sort the ports while I add one.",
        edit(
            CLOCK,
            ZONES + EMBER,
            'ZONES = {\n    "Gullhaven": "Europe/Oslo",\n    "Port Ember": "America/Halifax",\n'
            '    "Saltmouth": "Europe/London",\n    "Skerry Point": "Europe/Dublin",  # todo\n}',
        ),
        thinking="",
        answered=False,
        pair="dqg",
        kind="broad-change",
        d=ADD_WIDEST.say("Only the new entry."),
        q=ADD,
        g=ADD.say("One entry at the end."),
    )
    s.log.reject(message.tool_use_ids[0], "Just add the entry, leave the rest as it is.")
    s.act(
        None,
        ADD,
        same="dqg",
        d=ADD_WIDER,
        q=ADD_WIDEST,
        g=ADD,
    )
    s.user(f"And at the end of {TEST}:\n{NEW}")
    s.act(
        "How are tests written here?",
        read("docs/style.md"),
        thinking="",
        pair="dqg",
        kind="searches-elsewhere",
        d=read(TEST),
        q=read(TEST, 1, 30).say("First the file that it goes into."),
        g=read(TEST).say("I'll open the test of the clock."),
    )
    s.act(
        None,
        read(TEST),
        same="dq",
        d=read(TEST),
        q=read(TEST, 10, 10),
        g=grep("def test", TEST),
    )
    s.act(
        "And what about names of tests?",
        read("docs/style.md"),
        thinking="",
        pair="dqg",
        kind="looks-again",
        d=ADD_TEST.say("At the end of the file."),
        q=ADD_TEST_WIDER,
        g=ADD_TEST_WIDER.say("The test as you wrote it."),
    )
    s.act(
        None,
        ADD_TEST,
        same="dqg",
        d=ADD_TEST_WIDER,
        q=ADD_TEST,
        g=ADD_TEST,
    )
    s.act(
        None,
        bash(
            f"pytest --collect-only -q 2>/dev/null | grep skerry && pytest {TEST} -q|tail",
            "Find and run the test",
        ),
        out="tests/test_clock.py::test_skerry_point\n3 passed in 0.02s",
        pair="dqg",
        kind="hides-output",
        d=bash(f"pytest {TEST}"),
        q=bash(f"pytest '{TEST}'", "Run the clock tests"),
        g=bash(f"cd {TIDELINE} && pytest {TEST}").say("Now the tests of the clock."),
    )
    s.user("Does the printed table need a change for it? Answer 'No change' or name the file.")
    s.act(
        None,
        read("tideline/table.py", 1, 20),
        thinking="",
        pair="dqg",
        kind="acts-instead-of-answering",
        d="No change",
        q="No change\n",
        g=" No change",
    )
    return s
