"""The four invented projects that the sessions work on, as they are before a session."""

STYLE = "# Style\n\nShort functions, plain names, one test for each thing that can go wrong.\n"

# A command line tool that prints tide tables.

TIDELINE = "/home/mira/code/tideline"

CLOCK = '''\
"""Local clock times for tide predictions, which are computed in UTC."""

from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

ZONES = {"Gullhaven": "Europe/Oslo", "Saltmouth": "Europe/London", "Port Ember": "America/Halifax"}
STANDARD_OFFSET = {"Gullhaven": 1, "Saltmouth": 0, "Port Ember": -4}


def zone(port: str) -> ZoneInfo:
    return ZoneInfo(ZONES[port])


def to_local(port: str, moment: datetime) -> datetime:
    """Return a UTC moment on the clock of the port."""
    offset = timedelta(hours=STANDARD_OFFSET[port])
    return moment.astimezone(timezone(offset))


def label(moment: datetime) -> str:
    return moment.strftime("%H:%M")
'''

CLOCK_FIXED = CLOCK.replace(
    """\
    offset = timedelta(hours=STANDARD_OFFSET[port])
    return moment.astimezone(timezone(offset))
""",
    """\
    return moment.astimezone(zone(port))
""",
)

TEST_CLOCK = """\
from datetime import datetime, timezone

from tideline.clock import label, to_local


def at(day: int, month: int, hour: int) -> datetime:
    return datetime(2025, month, day, hour, tzinfo=timezone.utc)


def test_winter_time():
    assert label(to_local("Gullhaven", at(12, 1, 4))) == "05:00"


def test_summer_time():
    assert label(to_local("Gullhaven", at(12, 7, 4))) == "06:00"
"""

TABLE = '''\
"""Turn predictions into the printed table."""

from tideline.clock import label, to_local


def rows(port, tides):
    for tide in tides:
        yield label(to_local(port, tide.moment)), tide.kind, f"{tide.height_m:.1f} m"


def render(port, tides, width=28):
    lines = [port.center(width), "-" * width]
    for time, kind, height in rows(port, tides):
        lines.append(f"{time}  {kind:<5}{height:>{width - 12}}")
    return "\\n".join(lines)
'''

TIDELINE_CLI = '''\
"""Command line: tideline PORT [--days N]."""

import argparse

from tideline.predict import predict
from tideline.table import render


def parser():
    args = argparse.ArgumentParser(prog="tideline")
    args.add_argument("port")
    args.add_argument("--days", type=int, default=1)
    return args


def main(argv=None):
    options = parser().parse_args(argv)
    tides = predict(options.port, options.days)
    print(render(options.port, tides))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
'''

PREDICT = '''\
"""A toy harmonic model: one lunar and one solar constituent for each port."""

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

LUNAR_DAY_H = 24.84


@dataclass(frozen=True)
class Tide:
    moment: datetime
    kind: str
    height_m: float


def predict(port, days):
    start = datetime.now(timezone.utc).replace(minute=0, second=0, microsecond=0)
    n_tides = int(days * 24 / (LUNAR_DAY_H / 4))
    for idx in range(n_tides):
        moment = start + timedelta(hours=idx * LUNAR_DAY_H / 4)
        high = idx % 2 == 0
        yield Tide(moment, "high" if high else "low", 3.4 if high else 0.6)
'''

TEST_TABLE = """\
from tideline.table import render


def test_empty_table_has_a_header():
    assert render("Saltmouth", []).startswith("         Saltmouth")


def test_header_is_underlined():
    assert render("Saltmouth", []).splitlines()[1] == "-" * 28
"""

TIDELINE_FILES = {
    "docs/style.md": STYLE,
    "README.md": "# tideline\n\nTide tables for small ports.\n\n    tideline Gullhaven --days 2\n",
    "pyproject.toml": '[project]\nname = "tideline"\nversion = "0.6.0"\n',
    "tideline/__init__.py": '__version__ = "0.6.0"\n',
    "tideline/clock.py": CLOCK,
    "tideline/table.py": TABLE,
    "tideline/predict.py": PREDICT,
    "tideline/cli.py": TIDELINE_CLI,
    "tests/test_clock.py": TEST_CLOCK,
    "tests/test_table.py": TEST_TABLE,
}

# A small web service for a library.

STACKS = "/home/jonas/work/stacks"

LOANS = '''\
"""Loans and the fines for bringing books back late."""

from dataclasses import dataclass
from datetime import date

FINE_PER_DAY = 20
MAX_FINE = 800


@dataclass
class Loan:
    book: str
    member: str
    due: date
    returned: date | None = None


def days_late(loan: Loan, today: date) -> int:
    end = loan.returned or today
    return (end - loan.due).days


def fine(loan: Loan, today: date) -> int:
    """Return the fine in cents."""
    return min(days_late(loan, today) * FINE_PER_DAY, MAX_FINE)
'''

HOLDS = '''\
"""Holds: members wait in line for a book that is out."""


class Shelf:
    def __init__(self):
        self.holds = {}

    def place(self, book, member):
        line = self.holds.setdefault(book, [])
        line.append(member)
        return len(line)

    def cancel(self, book, member):
        self.holds[book].remove(member)

    def next_member(self, book):
        line = self.holds.get(book, [])
        return line.pop() if line else None
'''

STACKS_APP = '''\
"""Routes of the library service."""

from datetime import date

from stacks.holds import Shelf
from stacks.loans import fine
from stacks.web import App, Response

app = App()
shelf = Shelf()


@app.get("/members/<member>/fines")
def member_fines(member):
    loans = app.store.loans_of(member)
    total = sum(fine(loan, date.today()) for loan in loans)
    return Response.json({"member": member, "cents": total})


@app.post("/books/<book>/holds")
def place_hold(book, body):
    position = shelf.place(book, body["member"])
    return Response.json({"position": position}, status=201)


@app.delete("/books/<book>/holds/<member>")
def cancel_hold(book, member):
    shelf.cancel(book, member)
    return Response.empty()
'''

STACKS_WEB = '''\
"""A web framework of one page: routes, responses, errors."""

import json
from dataclasses import dataclass


@dataclass
class Response:
    status: int
    body: bytes = b""

    @classmethod
    def json(cls, value, status=200):
        return cls(status, json.dumps(value).encode())

    @classmethod
    def empty(cls):
        return cls(204)


class App:
    def __init__(self, store=None):
        self.store = store
        self.routes = {}

    def get(self, path):
        return self._route("GET", path)

    def post(self, path):
        return self._route("POST", path)

    def delete(self, path):
        return self._route("DELETE", path)

    def _route(self, method, path):
        def register(handler):
            self.routes[method, path] = handler
            return handler

        return register
'''

TEST_LOANS = """\
from datetime import date

from stacks.loans import Loan, fine


def loan(due_day: int) -> Loan:
    return Loan("Moby-Dick", "ada", date(2025, 5, due_day))


def test_three_days_late():
    assert fine(loan(1), date(2025, 5, 4)) == 60


def test_early_return_costs_nothing():
    assert fine(loan(9), date(2025, 5, 4)) == 0
"""

TEST_HOLDS = """\
from stacks.holds import Shelf


def test_first_come_first_served():
    shelf = Shelf()
    shelf.place("Emma", "ada")
    shelf.place("Emma", "ben")
    assert shelf.next_member("Emma") == "ada"


def test_empty_line():
    assert Shelf().next_member("Emma") is None
"""

STACKS_SERVER = '''\
"""Start the service: python -m stacks.server."""

import os

from stacks.app import app

PORT = int(os.environ.get("STACKS_PORT", "8000"))
WORKERS = 4
TIMEOUT_S = 3


def main():
    app.serve(port=PORT, workers=WORKERS, timeout_s=TIMEOUT_S)
'''

STACKS_FILES = {
    "docs/style.md": STYLE,
    "README.md": "# stacks\n\nLoans, fines and holds for a town library.\n",
    "stacks/app.py": STACKS_APP,
    "stacks/holds.py": HOLDS,
    "stacks/loans.py": LOANS,
    "stacks/server.py": STACKS_SERVER,
    "stacks/web.py": STACKS_WEB,
    "tests/test_holds.py": TEST_HOLDS,
    "tests/test_loans.py": TEST_LOANS,
    "deploy/run.sh": "#!/bin/sh\nset -eu\n. deploy/settings.env\nexec python -m stacks.server\n",
}

# A command line tool in Rust that mends broken CSV files.

CSVMEND = "/Users/lena/src/csvmend"

QUOTE_RS = """\
//! Quoting: when a field needs quotes, and how to write them.

pub fn needs_quotes(field: &str, delimiter: char) -> bool {
    field.contains(delimiter) || field.contains('\\n')
}

pub fn quote(field: &str, delimiter: char) -> String {
    if !needs_quotes(field, delimiter) {
        return field.to_string();
    }
    format!("\\"{}\\"", field.replace('"', "\\"\\""))
}
"""

SNIFF_RS = """\
//! Guess the delimiter of a file from its first lines.

const CANDIDATES: [char; 3] = [',', ';', '\\t'];

pub fn delimiter(sample: &str) -> char {
    let first = sample.lines().next().unwrap_or("");
    *CANDIDATES
        .iter()
        .max_by_key(|c| first.matches(**c).count())
        .unwrap()
}
"""

CSVMEND_MAIN = """\
mod quote;
mod sniff;

use std::io::{self, Read, Write};

fn main() -> io::Result<()> {
    let mut text = String::new();
    io::stdin().read_to_string(&mut text)?;
    let delimiter = sniff::delimiter(&text);
    let mut out = io::stdout().lock();
    for line in text.lines() {
        let fields: Vec<String> = line
            .split(delimiter)
            .map(|field| quote::quote(field.trim(), delimiter))
            .collect();
        writeln!(out, "{}", fields.join(&delimiter.to_string()))?;
    }
    Ok(())
}
"""

TEST_QUOTES = """\
use csvmend::quote::quote;

#[test]
fn plain_fields_stay_plain() {
    assert_eq!(quote("tide", ','), "tide");
}

#[test]
fn inner_quotes_are_doubled() {
    assert_eq!(quote("5\\" nail", ','), "\\"5\\"\\" nail\\"");
}
"""

TEST_SNIFF = """\
use csvmend::sniff::delimiter;

#[test]
fn semicolons() {
    assert_eq!(delimiter("a;b;c\\n1;2;3"), ';');
}

#[test]
fn pipes() {
    assert_eq!(delimiter("a|b|c\\n1|2|3"), '|');
}
"""

CSVMEND_FILES = {
    "docs/style.md": STYLE,
    "Cargo.toml": '[package]\nname = "csvmend"\nversion = "0.2.1"\nedition = "2021"\n',
    "src/lib.rs": "pub mod quote;\npub mod sniff;\n",
    "src/main.rs": CSVMEND_MAIN,
    "src/quote.rs": QUOTE_RS,
    "src/sniff.rs": SNIFF_RS,
    "tests/quotes.rs": TEST_QUOTES,
    "tests/sniffing.rs": TEST_SNIFF,
}

# A log book for pottery kilns, in TypeScript.

KILN = "/home/noor/dev/kiln-log"

RAMP_TS = """\
import { toCelsius, type Unit } from "./units";

export interface Segment {
  ratePerHour: number;
  target: number;
  holdMinutes: number;
}

/** Hours that a firing takes, starting at room temperature. */
export function duration(segments: Segment[], unit: Unit, start = 20): number {
  let hours = 0;
  let temperature = start;
  for (const segment of segments) {
    const target = toCelsius(segment.target, unit);
    hours += (target - temperature) / segment.ratePerHour;
    hours += segment.holdMinutes;
    temperature = target;
  }
  return hours;
}
"""

UNITS_TS = """\
export type Unit = "C" | "F";

export function toCelsius(degrees: number, unit: Unit): number {
  return unit === "C" ? degrees : (degrees - 32) / 1.8;
}

export function show(degrees: number, unit: Unit): string {
  return `${Math.round(degrees)}${unit}`;
}
"""

CHART_TS = """\
import { show, type Unit } from "./units";

export interface Reading {
  minute: number;
  celsius: number;
}

export function axis(readings: Reading[], unit: Unit, steps = 4): string[] {
  const top = Math.max(...readings.map((reading) => reading.celsius));
  const labels: string[] = [];
  for (let step = steps; step >= 0; step -= 1) {
    labels.push(show((top * step) / steps, unit));
  }
  return labels;
}
"""

TEST_RAMP = """\
import { expect, test } from "vitest";
import { duration } from "../src/ramp";

test("a straight ramp", () => {
  expect(duration([{ ratePerHour: 100, target: 1020, holdMinutes: 0 }], "C")).toBe(10);
});

test("a hold is counted in minutes", () => {
  expect(duration([{ ratePerHour: 100, target: 1020, holdMinutes: 30 }], "C")).toBe(10.5);
});

test("cooling segments take time", () => {
  const segments = [
    { ratePerHour: 100, target: 1020, holdMinutes: 0 },
    { ratePerHour: 100, target: 520, holdMinutes: 0 },
  ];
  expect(duration(segments, "C")).toBe(15);
});
"""

TEST_CHART = """\
import { expect, test } from "vitest";
import { axis } from "../src/chart";

test("labels are in the chosen unit", () => {
  expect(axis([{ minute: 0, celsius: 100 }], "F", 1)).toEqual(["212F", "32F"]);
});
"""

KILN_FILES = {
    "docs/style.md": STYLE,
    "package.json": '{\n  "name": "kiln-log",\n  "scripts": { "test": "vitest run" }\n}\n',
    "src/chart.ts": CHART_TS,
    "src/ramp.ts": RAMP_TS,
    "src/units.ts": UNITS_TS,
    "test/chart.test.ts": TEST_CHART,
    "test/ramp.test.ts": TEST_RAMP,
}
