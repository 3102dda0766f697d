"""The sessions of twins: a row of small requests each, in one of the four projects."""

from dataclasses import dataclass
from itertools import islice

from story import Story

from scenarios.twins import (
    CSVMEND,
    KILN,
    STACKS,
    TIDELINE,
    Aside,
    Project,
    Sitting,
    Telling,
    both,
    contested,
    declined,
    delayed,
    garbled,
    history,
    malformed,
    named,
    number,
    package,
    refused,
    rules,
    search,
    stage,
    status,
    stopped,
    suite,
    unseen,
)
from tests.support.sessions import Era

PARTS = {
    TIDELINE: {
        "clock": "Local times",
        "table": "The printed table",
        "ports": "Where the ports are",
        "moon": "Phases of the moon",
        "chart": "A chart of one day",
        "cache": "Predictions kept on disk",
    },
    STACKS: {
        "fines": "What a late book costs",
        "holds": "Who waits for a book",
        "shelf": "Where a book stands",
        "loans": "What is lent",
        "notice": "Letters to members",
        "stock": "Copies of a book",
    },
    CSVMEND: {
        "quote": "Quoted fields",
        "sniff": "Guess the delimiter",
        "blank": "Blank fields",
        "split": "Cut a file in parts",
        "merge": "Join two files",
        "header": "Names of the columns",
    },
    KILN: {
        "ramp": "How fast it heats",
        "probe": "Readings of the probe",
        "store": "Firings on disk",
        "alarm": "When to warn",
        "glaze": "Recipes of glazes",
        "fan": "The fan of the kiln",
    },
}
PACKAGES = {
    TIDELINE: ("tomli", "rich", "httpx"),
    STACKS: ("redis", "jinja", "click"),
    CSVMEND: ("serde", "regex", "clap"),
    KILN: ("zod", "yaml", "chalk"),
}

Twin = tuple[Telling, str, str]


@dataclass(frozen=True)
class Sheet:
    """What one session is made of: its twins, and the few states of another kind between them."""

    name: str
    shows: str
    project: Project
    version: str
    start: str
    twins: tuple[Twin, ...]
    asides: tuple[tuple[Aside, str], ...]
    is_resumed: bool = False
    """Whether its second half is in a file of its own, which begins with a copy of the first."""

    @property
    def era(self) -> Era:
        """The format of the log, which goes with the version."""
        return (
            "progress" if tuple(map(int, self.version.split("."))) < (2, 1, 100) else "attachment"
        )


SHEETS = (
    Sheet(
        "tideline-monday",
        "the first jobs of a week",
        TIDELINE,
        "2.0.71",
        "2026-01-05T08:00:11.100Z",
        (
            (package, "httpx", "tomli"),
            (search, "clock", "cache"),
            (stage, "moon", "cache"),
            (number, "24", "40"),
            (suite, "clock", "chart"),
            (history, "moon", "clock"),
        ),
        (
            (contested, "clock"),
            (declined, "table"),
            (delayed, "ports"),
            (refused, "chart"),
        ),
    ),
    Sheet(
        "stacks-monday",
        "a red test and a rule",
        STACKS,
        "2.1.35",
        "2026-02-07T09:07:11.137Z",
        (
            (rules, "review", "docs"),
            (named, "fines", "notice"),
            (status, "holds", "shelf"),
            (both, "loans", "holds"),
            (number, "24", "36"),
            (package, "jinja", "redis"),
        ),
        (
            (garbled, "holds"),
            (malformed, "shelf"),
            (stopped, "loans"),
            (refused, "notice"),
        ),
    ),
    Sheet(
        "csvmend-monday",
        "what was changed, and where",
        CSVMEND,
        "2.1.22",
        "2026-03-09T10:14:11.174Z",
        (
            (stage, "quote", "merge"),
            (rules, "release", "docs"),
            (suite, "quote", "merge"),
            (search, "header", "quote"),
            (both, "merge", "quote"),
            (history, "merge", "sniff"),
        ),
        (
            (unseen, "blank"),
            (contested, "split"),
            (declined, "merge"),
            (refused, "blank"),
        ),
    ),
    Sheet(
        "kiln-monday",
        "small things before a release, resumed the day after",
        KILN,
        "2.1.29",
        "2026-04-11T11:21:11.211Z",
        (
            (named, "probe", "fan"),
            (status, "fan", "probe"),
            (history, "ramp", "glaze"),
            (both, "store", "glaze"),
            (stage, "alarm", "store"),
            (number, "40", "32"),
        ),
        (
            (delayed, "alarm"),
            (garbled, "glaze"),
            (malformed, "fan"),
            (refused, "glaze"),
        ),
        is_resumed=True,
    ),
    Sheet(
        "tideline-tuesday",
        "a new machine",
        TIDELINE,
        "2.1.26",
        "2026-04-13T12:28:11.248Z",
        (
            (search, "chart", "clock"),
            (status, "clock", "chart"),
            (rules, "docs", "review"),
            (named, "ports", "table"),
            (package, "rich", "httpx"),
            (suite, "clock", "cache"),
        ),
        (
            (stopped, "chart"),
            (unseen, "cache"),
            (contested, "clock"),
        ),
    ),
    Sheet(
        "stacks-tuesday",
        "looking for functions",
        STACKS,
        "2.1.211",
        "2026-05-15T13:35:11.285Z",
        (
            (both, "fines", "stock"),
            (package, "jinja", "click"),
            (number, "24", "40"),
            (history, "stock", "shelf"),
            (search, "stock", "notice"),
            (rules, "docs", "release"),
        ),
        (
            (declined, "stock"),
            (delayed, "fines"),
            (garbled, "holds"),
        ),
    ),
    Sheet(
        "csvmend-tuesday",
        "one file at a time",
        CSVMEND,
        "2.1.41",
        "2026-06-17T14:42:11.322Z",
        (
            (status, "sniff", "blank"),
            (stage, "sniff", "header"),
            (named, "split", "header"),
            (suite, "split", "quote"),
            (package, "serde", "regex"),
            (search, "split", "merge"),
        ),
        (
            (malformed, "quote"),
            (stopped, "sniff"),
            (unseen, "blank"),
        ),
    ),
    Sheet(
        "kiln-tuesday",
        "after a merge",
        KILN,
        "2.1.221",
        "2026-07-19T15:49:11.359Z",
        (
            (named, "store", "probe"),
            (history, "alarm", "glaze"),
            (rules, "nightly", "docs"),
            (number, "40", "32"),
            (both, "fan", "alarm"),
            (stage, "probe", "fan"),
        ),
        (
            (contested, "probe"),
            (declined, "store"),
            (delayed, "alarm"),
        ),
    ),
    Sheet(
        "tideline-wednesday",
        "tidying up",
        TIDELINE,
        "2.1.252",
        "2026-07-21T16:56:11.396Z",
        (
            (suite, "ports", "cache"),
            (status, "clock", "table"),
            (named, "moon", "chart"),
            (search, "ports", "chart"),
            (both, "chart", "ports"),
            (number, "32", "36"),
        ),
        (
            (garbled, "ports"),
            (malformed, "moon"),
            (stopped, "chart"),
        ),
    ),
    Sheet(
        "stacks-evening",
        "a value that three people want",
        STACKS,
        "2.1.239",
        "2026-08-23T08:03:11.433Z",
        (
            (package, "click", "redis"),
            (stage, "loans", "notice"),
            (suite, "loans", "stock"),
            (rules, "docs", "release"),
            (status, "fines", "loans"),
            (history, "stock", "shelf"),
        ),
        (
            (unseen, "loans"),
            (contested, "notice"),
            (declined, "stock"),
        ),
    ),
    Sheet(
        "csvmend-wednesday",
        "half an hour before lunch",
        CSVMEND,
        "2.1.263",
        "2026-09-25T09:10:11.470Z",
        (
            (suite, "quote", "header"),
            (status, "merge", "sniff"),
            (named, "merge", "quote"),
            (history, "blank", "merge"),
            (both, "quote", "header"),
            (stage, "sniff", "merge"),
        ),
        (
            (delayed, "merge"),
            (garbled, "header"),
            (malformed, "quote"),
        ),
    ),
    Sheet(
        "kiln-wednesday",
        "the last jobs of a month",
        KILN,
        "2.1.280",
        "2026-10-27T10:17:11.507Z",
        (
            (number, "40", "32"),
            (rules, "docs", "release"),
            (package, "yaml", "zod"),
            (search, "probe", "ramp"),
            (stage, "fan", "store"),
            (both, "store", "glaze"),
        ),
        (
            (stopped, "fan"),
            (unseen, "ramp"),
            (contested, "probe"),
        ),
    ),
)


def stories() -> list[Story]:
    """Tell every session of twins."""
    return [_told(sheet) for sheet in SHEETS]


def _told(sheet: Sheet) -> Story:
    project = sheet.project
    story = Story(
        sheet.name,
        sheet.shows,
        era=sheet.era,
        version=sheet.version,
        cwd=project.cwd,
        start=sheet.start,
        files=project.files(PARTS[project], PACKAGES[project]),
    )
    sitting = Sitting(story, project)
    twins, asides = sheet.twins, iter(sheet.asides)
    turned = [(telling, wrong, right) for telling, right, wrong in twins]
    # The second tellings come in another order than the first: where a state stands says nothing.
    for n, part in enumerate((twins[:3], turned[1::-1], twins[3:], turned[2:4], turned[:3:-1])):
        if n == 2 and sheet.is_resumed:
            story.go_on_in(story.log.copied(f"{sheet.name}-resumed", is_fork=False))
        for telling, right, wrong in part:
            telling(sitting, right, wrong)
        for aside, name in islice(asides, 1):
            aside(sitting, name)
    return story
