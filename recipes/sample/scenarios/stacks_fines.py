"""A negative fine: a subagent for a search of one line, and a fix that hides the sign."""

from story import Story, bash, edit, grep, read, task

from scenarios.projects import STACKS, STACKS_FILES

DAYS = "    return (end - loan.due).days"
ABS = "    return abs((end - loan.due).days)"
MAX = "    return max(0, (end - loan.due).days)"
END = "    end = loan.returned or today\n"
HEAD = "def days_late(loan: Loan, today: date) -> int:\n"

FAILURE = """\
F..F                                                                     [100%]
=================================== FAILURES ===================================
_________________________ test_first_come_first_served _________________________
>       assert shelf.next_member("Emma") == "ada"
E       AssertionError: assert 'ben' == 'ada'

tests/test_holds.py:8: AssertionError
_______________________ test_early_return_costs_nothing ________________________
>       assert fine(loan(9), date(2025, 5, 4)) == 0
E       AssertionError: assert 100 == 0

tests/test_loans.py:15: AssertionError
=========================== short test summary info ============================
FAILED tests/test_holds.py::test_first_come_first_served - AssertionError: assert 'ben' == 'ada'
FAILED tests/test_loans.py::test_early_return_costs_nothing - AssertionError: assert 100 == 0
2 failed, 2 passed in 0.06s"""
GREP = "\n".join(
    f"./{path}:{number}:{line}"
    for path, text in STACKS_FILES.items()
    for number, line in enumerate(text.splitlines(), 1)
    if "fine" in line
)


def tell() -> Story:
    s = Story(
        "stacks-fines",
        "a subagent inside progress rows, results between the calls of one message, `abs` as a fix",
        era="progress",
        version="2.1.38",
        cwd=STACKS,
        start="2026-02-11T10:02:44.870Z",
        files=STACKS_FILES,
        git_branch="fix/fines",
    )
    s.log.snapshot()
    s.user(
        "GET /members/ada/fines returned -100 for a book that isn't due yet. A fine is never"
        " negative. test_early_return_costs_nothing covers it, please fix the cause."
    )
    message = s.act(
        "I'll let an agent find where fines are computed.",
        task("Task", "Find the fine code", "Find where fines are computed and report the lines."),
        thinking="I don't know the code base yet.",
        answered=False,
        divided=True,
        kind="delegates-small-search",
        d=grep(r"def fine", "stacks"),
        q=grep(r"def fine", "stacks", **{"-n": True}).say("I'll search for the function."),
        g=grep(r"def fine", "stacks", **{"-A": 4}),
    )
    agent = s.log.subagent(
        message.tool_use_ids[0],
        "Find where fines are computed and report the lines.",
        agent_type="Explore",
        description="Find the fine code",
    )
    s.act(
        None,
        bash("grep -rn 'fine' .|head", "Search for fine"),
        log=agent,
        out=GREP,
        divided=True,
        kind="shell-instead-of-tool",
        d=grep("fine", "stacks"),
        q=grep("fine", "stacks/", head_limit=40).say("Searching the package."),
        g=bash("ls stacks", "List the package"),
    )
    s.act(
        "The computation is in loans.py.",
        read("stacks/loans.py"),
        log=agent,
        same="dqg",
        d=read("stacks/loans.py", 15, 20),
        q=read("stacks/loans.py"),
        g=read("stacks/loans.py").say("Reading the function itself."),
    )
    report = (
        "Fines are computed in stacks/loans.py: days_late (lines 18-20) and fine (lines 23-25)."
        " days_late can be negative, and fine multiplies it."
    )
    s.act(
        report,
        log=agent,
        d="stacks/loans.py: `fine` (line 23) multiplies `days_late` (line 18), which goes negative"
        " before the due date.",
        q="See days_late and fine in stacks/loans.py. Nothing stops days_late from being negative.",
        g=read("stacks/app.py"),
    )
    agent.finish(report)
    s.read_paths.clear()
    s.act(
        "I'll read the code and its test.",
        read("stacks/loans.py"),
        read("tests/test_loans.py"),
        streamed=True,
        same="dq",
        d=[read("tests/test_loans.py"), read("stacks/loans.py")],
        q=[read("stacks/loans.py", 1, 30), read("tests/test_loans.py", 1, 30)],
        g=read("stacks/loans.py", 18, 8),
    )
    s.act(
        "The sign is wrong, so I'll take the absolute value.",
        edit("stacks/loans.py", DAYS, ABS),
        thinking="abs makes every fine positive.",
        divided=True,
        kind="patches-symptom",
        d=edit("stacks/loans.py", END + DAYS, END + MAX).say("Days late can't be below zero."),
        q=edit("stacks/loans.py", DAYS, MAX).say("I'll clamp days_late at zero."),
        g=edit(
            "stacks/loans.py",
            "min(days_late(loan, today) * FINE_PER_DAY, MAX_FINE)",
            "max(0, min(days_late(loan, today) * FINE_PER_DAY, MAX_FINE))",
        ),
    )
    s.act(
        None,
        bash("pytest tests|tail", "Run tests"),
        out=FAILURE,
        code=1,
        divided=True,
        kind="whole-suite",
        d=bash("pytest tests/test_loans.py"),
        q=bash("pytest tests/test_loans.py  # only the loans").say("Checking the loan tests."),
        g=bash(f"cd '{STACKS}' && pytest tests/test_loans.py"),
    )
    s.act(
        "Perhaps a stale cache, I'll run it again.",
        bash("pytest tests|tail", "Run tests again"),
        out=FAILURE,
        code=1,
        thinking="The fix looks right to me.",
        divided=True,
        kind="repeats-failed-call",
        d=edit("stacks/loans.py", ABS, MAX).say(
            "The result is 100 because abs only drops the sign."
        ),
        q=read("stacks/loans.py", 16, 10),
        g=edit("stacks/loans.py", HEAD + END + ABS, HEAD + END + MAX).say(
            "abs turns five days early into five days late; it has to be a floor at zero."
        ),
    )
    s.act(
        "An early return must count as zero days, not as a positive number.",
        edit("stacks/loans.py", ABS, MAX),
        same="dqg",
        d=edit("stacks/loans.py", END + ABS, END + MAX).say("A floor at zero is right."),
        q=edit("stacks/loans.py", ABS, MAX),
        g=edit("stacks/loans.py", HEAD + END + ABS, HEAD + END + MAX),
    )
    s.act(
        None,
        bash("pytest tests/test_loans.py", "Run the loan tests"),
        out="..                                                                       [100%]\n"
        "2 passed in 0.02s",
        same="dq",
        d=bash("pytest 'tests/test_loans.py'"),
        q=bash(f"cd {STACKS} && pytest tests/test_loans.py"),
        g=bash("pytest -q tests/test_loans.py::test_early_return_costs_nothing"),
    )
    return s
