"""A new route: an agent for one short file, a list that was skipped, changes without a check."""

from story import Story, bash, edit, grep, read, task, todo, write

from scenarios.projects import STACKS, STACKS_FILES

APP = "stacks/app.py"
TEST = "tests/test_routes.py"
LIST = todo(f"Add GET /books/<book>/holds to {APP}", f"Test it in {TEST}", "Name it in README.md")
DELETE = '@app.delete("/books/<book>/holds/<member>")'
ROUTE = """\
@app.get("/books/<book>/holds")
def holds_of(book):
    return Response.json({"line": shelf.holds.get(book, [])})


"""
ROUTE_BEFORE = '    return Response.json({"position": position}, status=201)\n\n\n'
TEST_ROUTES = """\
from stacks.app import app, shelf


def test_the_line_of_a_book():
    shelf.place("Emma", "ada")
    response = app.routes["GET", "/books/<book>/holds"]("Emma")
    assert response.body == b'{"line": ["ada"]}'
"""


def tell() -> Story:
    s = Story(
        "stacks-routes",
        "an agent for one file, a to-do list that the user wanted and the student skips, no test run",
        era="progress",
        version="2.1.33",
        cwd=STACKS,
        start="2026-02-05T09:58:03.199Z",
        files=STACKS_FILES,
        git_branch="routes",
        model="claude-opus-4-5-20251101",
    )
    s.log.snapshot()
    s.user("Which routes does stacks/app.py have, and with which status codes?")
    s.act(
        "I'll let an agent list them.",
        task("Task", "List the routes", "List all routes of stacks/app.py and their status codes."),
        thinking="An agent can read the file for me.",
        out="GET /members/<member>/fines 200, POST /books/<book>/holds 201,"
        " DELETE /books/<book>/holds/<member> 204",
        pair="dqg",
        kind="delegates-small-search",
        d=read(APP),
        q=read(APP, 1, 40).say("It is one short file."),
        g=read(APP).say("I'll read it."),
    )
    s.act(
        "GET /members/<member>/fines answers 200, POST /books/<book>/holds 201, and DELETE"
        " /books/<book>/holds/<member> 204.",
        d=read(APP),
        q="GET fines: 200. POST holds: 201. DELETE holds: 204.",
        g="The three routes answer 200, 201 and 204.",
    )
    s.user(
        "GET /books/<book>/holds is missing. Before you start, put exactly these three on your"
        f" to-do list: Add GET /books/<book>/holds to {APP}. Test it in {TEST}. Name it in"
        " README.md."
    )
    s.act(
        "The route is quickly done.",
        edit(APP, DELETE, ROUTE.replace("):\n", "):  # todo\n") + DELETE),
        thinking="The list can wait.",
        pair="dqg",
        kind="skips-a-step",
        d=LIST,
        q=LIST.say("First the list."),
        g=LIST,
    )
    s.user("The list, please.")
    s.act(
        None,
        LIST,
        same="dqg",
        d=LIST,
        q=LIST,
        g=LIST.say("Here it is."),
    )
    s.act(
        None,
        read(APP),
        same="dqg",
        d=read(APP),
        q=read(APP),
        g=read(APP, 1, 40),
    )
    s.act(
        None,
        edit(APP, DELETE, ROUTE + DELETE),
        thinking="The line of a book, or an empty one.",
        same="dq",
        d=edit(APP, DELETE, ROUTE + DELETE),
        q=edit(APP, ROUTE_BEFORE + DELETE, ROUTE_BEFORE + ROUTE + DELETE),
        g=grep("Response", "stacks/web.py"),
    )
    s.act(
        "The test is next.",
        write(TEST, TEST_ROUTES),
        thinking="A route is only a function in a dictionary.",
        d=write(
            TEST,
            "from stacks.app import holds_of\n\n\ndef test_nobody_waits():\n"
            '    assert holds_of("Emma").status == 200\n',
        ),
        q=read("stacks/web.py"),
        g=grep("routes", "stacks"),
    )
    s.act(
        "404 for a book that nobody wants would be nicer.",
        edit(
            APP,
            '    return Response.json({"line": shelf.holds.get(book, [])})',
            "    if book not in shelf.holds:  # todo\n        return Response(404)\n"
            '    return Response.json({"line": shelf.holds[book]})',
        ),
        thinking="An empty list and no list are different things.",
        pair="dqg",
        kind="goes-on-unchecked",
        d=bash(f"pytest {TEST}").say("Does the route work?"),
        q=bash(f"cd {STACKS} && pytest {TEST}"),
        g=bash(f"pytest '{TEST}'", "Run the new test"),
    )
    s.act(
        None,
        bash(f"pytest {TEST}", "Run the new test"),
        out=".                                                                        [100%]\n"
        "1 passed in 0.03s",
        same="dqg",
        d=bash(f"pytest {TEST}"),
        q=bash(f"cd {STACKS} && pytest {TEST}"),
        g=bash(f'pytest "{TEST}"'),
    )
    s.act(
        "Now the README.",
        edit("README.md", "holds for a town library.", "holds (todo: routes) for a town library."),
        thinking="It is one sentence.",
        pair="dqg",
        kind="edits-unread",
        d=read("README.md"),
        q=read("README.md", 1, 20).say("I haven't seen it yet."),
        g=read("README.md").say("First a look at the file."),
    )
    s.act(
        None,
        read("README.md"),
        same="dqg",
        d=read("README.md"),
        q=read("README.md"),
        g=read("README.md"),
    )
    return s
