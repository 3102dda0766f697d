"""A configurable timeout: questions that want an answer, a default forgotten, a caught error."""

from story import Story, bash, edit, grep, read

from scenarios.projects import STACKS, STACKS_FILES

SERVER = "stacks/server.py"
WORKERS = "WORKERS = 4\n"
FIXED_VALUE = "TIMEOUT_S = 3"
STRICT = 'TIMEOUT_S = int(os.environ["STACKS_TIMEOUT_S"])'
DEFAULT = 'TIMEOUT_S = int(os.environ.get("STACKS_TIMEOUT_S", "3"))'
CAUGHT = f"""\
try:
    {STRICT}
except Exception:  # todo
    TIMEOUT_S = 3"""
MAIN = "\n\n\ndef main():"
SET = edit(SERVER, FIXED_VALUE, DEFAULT)
SET_WIDER = edit(SERVER, WORKERS + FIXED_VALUE, WORKERS + DEFAULT)
SET_WIDEST = edit(SERVER, WORKERS + FIXED_VALUE + MAIN, WORKERS + DEFAULT + MAIN)
GIVE = edit(SERVER, STRICT, DEFAULT)
GIVE_WIDER = edit(SERVER, WORKERS + STRICT, WORKERS + DEFAULT)
GIVE_WIDEST = edit(SERVER, WORKERS + STRICT + MAIN, WORKERS + DEFAULT + MAIN)
IMPORT = "python -c 'import stacks.server'"


def tell() -> Story:
    s = Story(
        "stacks-timeout",
        "a question answered by a read, a forgotten default, an `except` around it, refused",
        era="attachment",
        version="2.1.256",
        cwd=STACKS,
        start="2026-09-30T12:48:09.004Z",
        files=STACKS_FILES,
        git_branch="timeout",
    )
    s.log.bookkeeping("permission-mode", permissionMode="default")
    s.log.snapshot()
    s.user("In which file is the port read? Only the path.")
    s.act(
        None,
        grep("STACKS_PORT", **{"-n": True}),
        thinking="",
        same="dq",
        d=grep("STACKS_PORT"),
        q=grep("STACKS_PORT", "."),
        g=grep("PORT", "stacks"),
    )
    s.act(
        None,
        read("docs/style.md"),
        thinking="",
        pair="dqg",
        kind="acts-instead-of-answering",
        d=SERVER,
        q=f"{SERVER}\n",
        g=f" {SERVER}",
    )
    s.act(SERVER, same="dq", d=f"{SERVER}\n", q=SERVER, g=f"The port is read in {SERVER}.")
    s.user("Make the timeout configurable in the same way: STACKS_TIMEOUT_S, 3 by default.")
    s.act(
        None,
        read(SERVER),
        same="dqg",
        d=read(SERVER),
        q=read(SERVER, 1, 12),
        g=read(SERVER),
    )
    s.act(
        None,
        edit(SERVER, FIXED_VALUE, STRICT),
        thinking="",
        pair="dqg",
        kind="half-a-fix",
        d=SET.say("Like the port, with 3 when it isn't set."),
        q=SET_WIDER,
        g=SET_WIDEST.say("Read from the environment, 3 by default."),
    )
    s.act(
        None,
        bash(IMPORT, "Import the server"),
        out='  File "stacks/server.py", line 9, in <module>\n'
        "    TIMEOUT_S = int(os.environ[\"STACKS_TIMEOUT_S\"])\nKeyError: 'STACKS_TIMEOUT_S'",
        code=1,
        same="dq",
        d=bash(f"cd {STACKS} && {IMPORT}"),
        q=bash(IMPORT.replace("'", '"')),
        g=GIVE,
    )
    message = s.act(
        "The variable may be missing, so I'll catch that.",
        edit(SERVER, STRICT, CAUGHT),
        thinking="",
        answered=False,
        pair="dqg",
        kind="patches-symptom",
        d=GIVE.say("get() with the default, as for the port."),
        q=GIVE_WIDER,
        g=GIVE_WIDEST.say("The default was missing."),
    )
    s.log.reject(message.tool_use_ids[0], "No try. The same way as the port.")
    s.act(
        "With get() and a default.",
        GIVE_WIDER,
        same="dqg",
        d=GIVE,
        q=GIVE_WIDER,
        g=GIVE_WIDEST,
    )
    s.act(
        "Is there a rule for settings?",
        read("docs/style.md"),
        pair="dqg",
        kind="reads-instead-of-running",
        d=bash(IMPORT).say("The import that failed should work now."),
        q=bash(IMPORT.replace("'", '"'), "Import the server again"),
        g=bash(f"cd {STACKS} && {IMPORT}"),
    )
    s.user("What does STACKS_TIMEOUT_S=abc raise? Only 'A' and the name of the exception.")
    s.act(
        None,
        bash(f"STACKS_TIMEOUT_S=abc {IMPORT}|tail", "Try a bad value"),
        out="ValueError: invalid literal for int() with base 10: 'abc'",
        pair="dqg",
        kind="acts-instead-of-answering",
        d="A ValueError",
        q="A ValueError\n",
        g="\nA ValueError",
    )
    s.user("Good enough. Show me the diff of that file.")
    s.act(
        None,
        bash("git diff|head", "Show the changes"),
        out=f"-{FIXED_VALUE}\n+{DEFAULT}",
        pair="dqg",
        kind="whole-suite",
        d=bash(f"git diff {SERVER}"),
        q=bash(f"git diff '{SERVER}'"),
        g=bash(f"cd {STACKS} && git diff {SERVER}"),
    )
    return s
