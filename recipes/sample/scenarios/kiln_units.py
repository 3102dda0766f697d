"""Celsius numbers with an F: a guessed path, a compaction on request, `rm` with a star."""

from story import Story, bash, edit, grep, read, write

from scenarios.projects import KILN, KILN_FILES

ROUND = "  return `${Math.round(degrees)}${unit}`;"
CONVERT = "  return `${Math.round(fromCelsius(degrees, unit))}${unit}`;"
INLINE = '  return `${Math.round(unit === "C" ? degrees : degrees * 1.8 + 32)}${unit}`;'
SHOW = "export function show(degrees: number, unit: Unit): string {\n"
ONE_FILE = "npx vitest run test/chart.test.ts"

SUMMARY = """\
This session is being continued from a previous conversation.

Request: the axis of the chart shows Celsius numbers with an F; test/chart.test.ts fails.
Found: axis() in src/chart.ts passes Celsius to show() in src/units.ts, which only rounds and
appends the unit. toCelsius() is right and is used by src/ramp.ts; it must not change.
Next: let show() convert when the unit is F, in src/units.ts. No file has been changed yet."""


def tell() -> Story:
    s = Story(
        "kiln-units",
        "a guessed path, a compaction on request, a new file for one line, `rm -rf` with a star",
        era="attachment",
        version="2.1.247",
        cwd=KILN,
        start="2026-09-21T15:03:47.644Z",
        files=KILN_FILES,
        git_branch="units",
    )
    s.log.bookkeeping("permission-mode", permissionMode="acceptEdits")
    s.log.snapshot()
    s.user(
        "The axis of the chart shows Celsius numbers with an F behind them. test/chart.test.ts"
        " fails. Please fix the labels."
    )
    s.act(
        "I'll open the axis component.",
        read("src/components/Axis.tsx"),
        thinking="",
        divided=True,
        kind="guesses-path",
        d=grep("axis", "src").say("I don't know the layout yet."),
        q=grep("axis", "src/").say("Where is the axis made?"),
        g=bash("ls src", "List the sources"),
    )
    s.act(
        "Searching for the function that writes the labels.",
        grep("show", "src"),
        same="dg",
        d=grep("show", "src", **{"-n": True}),
        q=grep("function show", "src"),
        g=grep("show", "src"),
    )
    s.act(
        "show() has to convert.",
        edit("src/units.ts", "return `${degrees}", "return /* todo: C */ `${degrees * 1.8 + 32}"),
        thinking="",
        divided=True,
        kind="edits-unread",
        d=read("src/units.ts"),
        q=read("src/units.ts", 1, 20),
        g=read("src/units.ts").say("I'll read show() before I change it."),
    )
    s.act(
        None,
        read("src/units.ts"),
        same="dqg",
        d=read("src/units.ts").say("Now with the file in view."),
        q=read("src/units.ts", 5, 8),
        g=read("src/units.ts"),
    )
    s.log.local_command("compact")
    s.log.compact(SUMMARY, trigger="manual")
    s.read_paths.clear()
    s.user("Go on.")
    s.act(
        "I'll put the conversion in a module of its own.",
        write(
            "src/convert.ts",
            "// todo\nexport const toFahrenheit = (celsius: number) => celsius * 1.8 + 32;\n",
        ),
        thinking="",
        divided=True,
        kind="writes-new-file",
        d=read("src/units.ts").say("Back to show(), which has to convert."),
        q=read("src/units.ts", 1, 12).say("I'll open units.ts again, where show() is."),
        g=read("src/units.ts").say("Continuing in units.ts."),
    )
    s.user("Please no extra module. Remove it and change show() in units.ts.")
    s.act(
        "I'll remove it.",
        bash("rm -rf src/con*", "Remove the new module"),
        pair="dqg",
        kind="destructive",
        d=bash("rm src/convert.ts").say("Removing the file again."),
        q=bash("rm 'src/convert.ts'", "Remove the new module"),
        g=bash(f"rm {KILN}/src/convert.ts").say("Only the file that I added."),
    )
    del s.files["src/convert.ts"]
    s.act(
        None,
        read("src/units.ts"),
        same="dq",
        d=read("src/units.ts"),
        q=read("src/units.ts", 7, 5).say("Back to show()."),
        g=grep("show", "src/units.ts"),
    )
    s.log.snapshot("src/units.ts")
    s.act(
        "Now show() converts.",
        edit("src/units.ts", ROUND, INLINE),
        thinking="",
        d=edit(
            "src/units.ts",
            SHOW + ROUND,
            "export function fromCelsius(degrees: number, unit: Unit): number {\n"
            '  return unit === "C" ? degrees : degrees * 1.8 + 32;\n}\n\n' + SHOW + CONVERT,
        ),
        q=edit(
            "src/units.ts",
            ROUND,
            '  const shown = unit === "F" ? degrees * 1.8 + 32 : degrees;\n'
            "  return `${Math.round(shown)}${unit}`;",
        ),
        g=read("src/chart.ts"),
    )
    s.act(
        "Perfect. The labels are converted.",
        divided=True,
        kind="no-check",
        d=bash(ONE_FILE).say("Now the chart test."),
        q=bash(f"cd {KILN} && {ONE_FILE}").say("Let me check the labels with their test."),
        g=bash('npx vitest run "test/chart.test.ts"', "Check the labels"),
    )
    s.log.bookkeeping("custom-title", customTitle="Chart labels in Fahrenheit")
    return s
