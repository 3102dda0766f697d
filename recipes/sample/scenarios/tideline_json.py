"""A --json flag: a new module where a function was wanted, and a refusal with feedback."""

from story import Broken, Story, bash, edit, grep, read, write

from scenarios.projects import CLOCK_FIXED, TABLE, TIDELINE, TIDELINE_FILES

TAIL = '    return "\\n".join(lines)\n'
AS_JSON = "\n\ndef as_json(port, tides):\n    return json.dumps(list(rows(port, tides)))\n"
LAST_LINE = '        lines.append(f"{time}  {kind:<5}{height:>{width - 12}}")\n'
ADD_FUNCTION = edit("tideline/table.py", TAIL, TAIL + AS_JSON)
ADD_FUNCTION_WIDER = edit("tideline/table.py", LAST_LINE + TAIL, LAST_LINE + TAIL + AS_JSON)

TITLE = '"""Turn predictions into the printed table."""\n'
IMPORT = "from tideline.clock import label, to_local\n"
ADD_IMPORT = edit("tideline/table.py", TITLE, TITLE + "\nimport json\n")
ADD_IMPORT_WIDER = edit(
    "tideline/table.py", f"{TITLE}\n{IMPORT}", f"{TITLE}\nimport json\n\n{IMPORT}"
)

DAYS = '    args.add_argument("--days", type=int, default=1)\n'
FLAG = '    args.add_argument("--json", action="store_true")\n'
ADD_FLAG = edit("tideline/cli.py", DAYS, DAYS + FLAG)
ADD_FLAG_WIDER = edit("tideline/cli.py", f"{DAYS}    return args", f"{DAYS}{FLAG}    return args")

NEW_MODULE = '''\
"""Tide tables as JSON."""

import json

from tideline.table import rows


def as_json(port, tides):
    # todo
    return json.dumps(list(rows(port, tides)), indent=2)
'''


def tell() -> Story:
    s = Story(
        "tideline-json",
        "parallel reads, a refusal with feedback, a whole file rewritten for one function",
        era="progress",
        version="2.1.12",
        cwd=TIDELINE,
        start="2026-01-09T17:40:05.118Z",
        files=TIDELINE_FILES | {"tideline/clock.py": CLOCK_FIXED},
        git_branch="json-flag",
        model="claude-opus-4-5-20251101",
    )
    s.log.summary("Fix summer time in the tide table")
    s.log.snapshot()
    s.log.local_command("model", "Set model to opus")
    s.user("Add a --json flag to the command line that prints the rows as JSON instead of a table.")
    s.act(
        "I'll look at the command line and at the table together.",
        read("tideline/cli.py"),
        read("tideline/table.py"),
        thinking="Both files matter, and neither depends on the other.",
        same="dq",
        d=[read("tideline/table.py"), read("tideline/cli.py")],
        q=[read("tideline/cli.py", 1, 50), read("tideline/table.py", 1, 50)],
        g=read("tideline/cli.py"),
    )
    message = s.act(
        "I'll put the JSON output in a module of its own.",
        write("tideline/json_table.py", NEW_MODULE),
        thinking="A separate module keeps the table code untouched.",
        answered=False,
        divided=True,
        kind="writes-new-file",
        d=ADD_FLAG.say("First the flag."),
        q=ADD_FLAG_WIDER.say("I'll start with the option in cli.py."),
        g=edit("tideline/cli.py", '("port")\n', '("port")\n' + FLAG),
    )
    s.log.reject(
        message.tool_use_ids[0],
        "No new module please. Put as_json(port, tides) at the end of table.py:"
        " return json.dumps(list(rows(port, tides)))",
    )
    s.act(
        "Understood, I'll write table.py with the function in it.",
        write("tideline/table.py", TABLE + AS_JSON),
        divided=True,
        kind="rewrites-file",
        d=ADD_FUNCTION.say("Adding the function at the end of table.py."),
        q=ADD_IMPORT,
        g=ADD_FUNCTION_WIDER.say("One function below render(), as you asked."),
    )
    s.act(
        "Is there a rule for new functions?",
        read("docs/style.md"),
        pair="dqg",
        outcome="deferred",
        kind="looks-again",
        d=ADD_IMPORT.say("json is not imported yet."),
        q=ADD_IMPORT_WIDER,
        g=ADD_IMPORT_WIDER.say("The function needs `import json`."),
    )
    s.act(
        "The import of json is missing.",
        ADD_IMPORT_WIDER,
        same="dqg",
        d=ADD_IMPORT,
        q=ADD_IMPORT_WIDER.say("The import is missing."),
        g=ADD_IMPORT,
    )
    s.act(
        None,
        edit(
            "tideline/cli.py",
            "    print(render(options.port, tides))",
            "    show = as_json if options.json else render\n    print(show(options.port, tides))",
        ),
        thinking="Choose the function by the flag.",
        d=Broken(
            "Edit",
            '{"file_path": "tideline/cli.py", "old_string": "    return args", "new_string": ',
            "malformed arguments",
        ),
        q=ADD_FLAG,
        g=grep("render", "tideline/cli.py"),
    )
    s.act(
        "Now I'll run everything to be sure.",
        bash(
            "pytest && python -m tideline.cli Saltmouth --json|tail",
            "Run tests and try the flag",
        ),
        out="....                                                                     [100%]\n"
        "4 passed in 0.05s\n"
        "usage: tideline [-h] [--days DAYS] port\n"
        "tideline: error: unrecognized arguments: --json",
        code=2,
        on_call=lambda call: s.log.progress(
            "bash_progress",
            call,
            output="4 passed in 0.05s",
            fullOutput="4 passed in 0.05s",
            elapsedTimeSeconds=2,
            totalLines=2,
        ),
        divided=True,
        kind="runs-too-early",
        d=ADD_FLAG_WIDER.say("main() reads options.json, but no such option is declared."),
        q=ADD_FLAG.say("The parser doesn't know the flag yet, so I'll add it."),
        g=ADD_FLAG_WIDER.say("Adding the option to the parser."),
    )
    return s
