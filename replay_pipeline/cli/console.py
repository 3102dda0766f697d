"""The output of commands for people: tables, sentences, and the next step."""

import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from textwrap import shorten
from typing import Any

from rich import markup
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from replay_pipeline.redaction.printable import printable

Report = Mapping[str, Any]


def escape(text: str) -> str:
    """Return `text` for a console, with all markup of rich and all control codes made inert."""
    return markup.escape(printable(text))


class PrintableFormatter(logging.Formatter):
    """Log lines without terminal escapes."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return printable(super().format(record))


out = Console(emoji=False)
err = Console(stderr=True, emoji=False)


def print_report(report: Report, *, as_json: bool, show: Callable[[Report], None]) -> None:
    """Print `report` as JSON for scripts, or with `show` for people."""
    if as_json:
        sys.stdout.write(json.dumps(report, indent=1, default=str) + "\n")
    else:
        show(report)


def say(text: str) -> None:
    """Print a sentence, wrapped between words in a terminal, and on one line elsewhere."""
    out.print(escape(text), highlight=False, soft_wrap=not out.is_terminal)


def next_step(words: str) -> None:
    """Print the next step as the last line of a command. It is one line, so that you can copy it."""
    out.print(f"Next: {escape(words)}.", highlight=False, soft_wrap=True)


def _title(title: str) -> None:
    """Print what is above a table, on one line however narrow the table is."""
    out.print(f"[bold]{escape(title)}[/]", highlight=False)


def _table(title: str, rows: Sequence[tuple[str, Any]]) -> None:
    """Draw names with what is to be said of each."""
    _title(title)
    table = Table(show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(escape(name), escape(_words(value)))
    out.print(table)


def _draw(
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    texts: Collection[str] = (),
) -> None:
    """Draw a table in which no name and no number is broken.

    Args:
        title: what is above it.
        headings: of the columns; the first has names, the others numbers.
        rows: a cell for each column.
        texts: columns of words, which are wrapped.
    """
    cells = [
        max((cell_len(printable(row[n])) for row in rows), default=0) for n in range(len(headings))
    ]
    whole = [max(cell_len(name), width) for name, width in zip(headings, cells, strict=True)]
    texts_width = sum(_LEAST_TEXT - whole[n] for n, name in enumerate(headings) if name in texts)
    # Headings are broken into their words only where there is no room for them in one piece.
    is_wide = sum(whole) + texts_width + 3 * len(headings) + 1 <= out.width
    _title(title)
    table = Table()
    for n, name in enumerate(headings):
        width = whole[n] if is_wide else max(cells[n], *map(cell_len, name.split()))
        is_text = name in texts
        side = "right" if n and not is_text else "left"
        table.add_column(
            escape(name), justify=side, width=None if is_text else width, overflow="fold"
        )
    for row in rows:
        table.add_row(*map(escape, row))
    out.print(table)


_LEAST_TEXT = 20
"""Characters that a column of words needs."""


def _counted(counts: Mapping[str, int]) -> str:
    """Name what was counted, the most first, with its number before it."""
    ordered = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    return ", ".join(f"{_words(n)} {_plain(name)}" for name, n in ordered) or "none"


def _plain(name: str) -> str:
    return name.replace("_", " ")


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(each)}" for key, each in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_words, value)) or "none"
    if isinstance(value, float):
        return f"{value:,.4f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "none" if value is None else str(value)


_PLAY = "these answers were made up in a rehearsal; nothing of it goes to the Hub"


def show_summary(summary: Report) -> None:
    """Show the table at the end of a run."""
    _tell_others([summary])
    train = summary["train"]
    n_looked = summary["only_looked"]
    n_answers, n_failed = summary["answers"], summary["failed_calls"]
    calls = (
        f"{summary['calls']} now; {n_answers + n_failed + n_looked} questions decided in all: "
        f"{n_answers} answers, {n_failed} failed"
    )
    dollars = (
        f"${summary['newly_spent_usd']:.4f} now, ${summary['spent_usd']:.4f} in all, ceiling "
        f"${summary['max_total_usd']:.2f}"
    )
    n_played, n_with = summary["rehearsed_answers"], summary["agreements_with_student"]
    rows = {
        "sessions": f"{summary['sessions']} in {summary['batches']} batches",
        "states": f"{summary['states']} (of {summary['turns']} turns)",
        "calls": calls + (f", {n_looked} only looked" if n_looked else ""),
        "dollars": dollars,
        "play": f"{n_played:,} answers: {_PLAY}" if n_played else "",
        "left": open_words(summary["open"]),
        "agreements": f"{summary['agreements']} ({n_with} with the agent)",
        "lessons": f"{summary['lessons']}; {n_with} actions of the agent confirmed, "
        f"{summary['unconfirmed']} answers of one teacher",
        "pairs": f"{summary['pairs']}, {summary['normalized_pairs']} kept",
        "dropped": _words(summary["dropped"]),
        "dataset": f"{summary['dataset']} ({_counted(_published(summary))})",
        "checks": summary.get("checks"),
        "stale": _stale_words(summary.get("stale") or {}),
        "seconds": {name: f"{seconds:.1f}" for name, seconds in summary["seconds"].items()},
    }
    _table("replay-pipeline", [(name, value) for name, value in rows.items() if value])
    if train:
        _tell_training(train, summary.get("curves") or {})


def _published(summary: Report) -> dict[str, int]:
    """Return the number of published rows of each kind; other configs hold some of them once more."""
    rows = summary["rows_by_split"]
    return {
        config: sum(rows.get(config, {}).values()) for config in ("pairs", "positives", "answers")
    }


def show_run(summary: Report) -> None:
    """Show the results of a run and the next step."""
    show_summary(summary)
    next_step("`replay-pipeline look` shows all of it on one page")


def _stale_words(batches: Report) -> str:
    """Describe why each stage is stale, and in how many batches."""
    found = Counter(
        f"{stage}: {why}"
        for row in batches.values()
        for stage, reasons in row.items()
        for why in reasons
    )
    return "; ".join(f"{why} ({n})" for why, n in found.items())


def _tell_training(train: Report, curves: Mapping[str, Sequence[float]]) -> None:
    """Report what a training came to in sentences, with its loss as a small plot."""
    from replay_pipeline.stages.pages.training import sentences_of
    from replay_pipeline.stages.work.markdown import sparkline

    for each in sentences_of(train):
        if each["kind"] == "finding":
            out.print(f"[bold red]{escape(each['text'])}[/]", soft_wrap=not out.is_terminal)
        else:
            say(each["text"])
    for name, curve in curves.items():
        if name in _PLOTTED and len(curve) > 1:
            plot = sparkline(curve)
            say(f"{_PLOTTED[name]:<16} {curve[0]:.3f} {plot} {curve[-1]:.3f}")


_PLOTTED = {"train/loss": "loss by step", "replay/accuracy": "pairs right"}
"""Curves of a training that are drawn in a terminal."""


_MOST_NAMED = 6
"""Projects, tools and outcomes that a summary names; the page has all of them."""


def show_look(overview: Report) -> None:
    """Show the contents of the sessions, largest first."""
    total, tokens = overview["total"], overview["tokens"]
    read, n_prompt = tokens["cache_read"], sum(tokens.values()) - tokens["output"]
    share = f"{100 * read / n_prompt:.0f} % of prompts from cache" if n_prompt else "none recorded"
    dearest = (
        f"${usd:,.2f} {shorten(title, 40, placeholder='…')}" for title, usd in overview["dearest"]
    )
    outcomes = {_plain(name): f"{n:,}" for name, n in overview["outcomes"].items()}
    cost = f"${overview['cost_usd']:,.2f} at list prices of {overview['prices_of']}"
    if unpriced := ", ".join(overview["models_without_price"]):
        cost += f"; without a price, so not in it: {unpriced}"
    rows = [
        ("sessions", f"{total['sessions']:,}, {total['subagents']:,} of them of subagents"),
        ("dates", f"{total['first']} to {total['last']}, in {overview['timezone']}"),
        ("decisions", f"{total['states']:,} in {total['turns']:,} turns"),
        ("went wrong", f"{total['errors']:,} errors, {total['interruptions']:,} interruptions"),
        ("tokens", f"{sum(tokens.values()):,}; {share}"),
        ("cost", cost),
        ("by month", _first_of(_by_period(overview, 7))),
        ("by day", _first_of(_by_period(overview, 10))),
        ("dearest", "; ".join(dearest)),
        (
            "projects",
            _first_of({p["name"]: f"${p['cost_usd']:,.2f}" for p in overview["projects"]}),
        ),
        ("tools", _first_of({name: f"{n:,}" for name, (n, _) in overview["tools"].items()})),
        ("outcomes", _first_of(outcomes)),
        ("redacted", _first_of(overview.get("redactions") or {})),
        (
            "left out",
            _first_of({**overview.get("skipped", {}), **overview.get("skipped_files", {})}),
        ),
    ]
    _table("Sessions", rows)
    models = {
        each["model"]: {
            "turns": f"{each['turns']:,}",
            "M tokens": f"{each['tokens'] / 1e6:,.1f}",
            "cost $": "no price" if each["cost_usd"] is None else f"{each['cost_usd']:,.2f}",
        }
        for each in overview["models"]
    }
    _draw_batches("Models", ("turns", "M tokens", "cost $"), models, first="model")
    if teachers := overview.get("teachers"):
        show_compare(teachers)


def _by_period(overview: Report, n_chars: int) -> dict[str, str]:
    """Return what the newest months or days cost, by so many characters of the date."""
    usd: dict[str, float] = {}
    for day, *_, usd_of_day in overview["days"]:
        name = day[:n_chars] or "no date"
        usd[name] = usd.get(name, 0.0) + (usd_of_day or 0.0)
    return {name: f"${usd[name]:,.2f}" for name in sorted(usd, reverse=True)}


def _first_of(counts: Mapping[str, Any]) -> str:
    """Name the first few of many, and say how many more there are."""
    named = ", ".join(f"{name} {n}" for name, n in list(counts.items())[:_MOST_NAMED])
    more = len(counts) - _MOST_NAMED
    return (f"{named}, and {more} more" if more > 0 else named) or "none"


def show_compare(found: Report) -> None:
    """Show which model you could have used: how similar each model was, and its cost."""
    if not found["teachers"]:
        say(
            "No teacher has answered yet: `replay-pipeline verdict MODEL --estimate` shows what a verdict costs."
        )
        _show_results(found)
        return
    headings = ("model", "answers", "alike", "95 %", "same", "equal", "$ per 100", "agent's")
    rows = [
        (
            each["teacher"],
            f"{each['n']:,}",
            f"{100 * each['share_alike']:.0f} %",
            "–".join(f"{100 * end:.0f}" for end in each["interval"]),
            f"{each['n_same']:,}",
            f"{each['n_equal']:,}",
            f"{100 * each['usd_per_decision']:.2f}",
            "–" if (usd := each["agent_usd_per_decision"]) is None else f"{100 * usd:.2f}",
        )
        for each in found["teachers"]
    ]
    _draw("Which model could have been used", headings, rows)
    if found["played"]:
        say(f"Play: {_PLAY}.")
    say(found["caveat"])
    _show_results(found)


def _show_results(found: Report) -> None:
    for row in found.get("results") or ():
        each = "–" if row["usd_per_resolved"] is None else f"${row['usd_per_resolved']:,.2f} each"
        say(
            f"{row['model']}: {row['n_resolved']} of {row['n']} conversations with a result were resolved, "
            f"for ${row['usd']:,.2f} ({each}). Other models may have had other tasks."
        )


def show_verdict(report: Report) -> None:
    """Show a verdict: the sentence, the kinds of work, and what it rests on."""
    say(report["words"])
    rows = [
        (
            each["kind"],
            f"{each['n']:,}",
            f"{100 * each['difference']:+.0f}",
            f"{100 * each['low']:+.0f} to {100 * each['high']:+.0f}",
            each["who"],
        )
        for each in report["by_kind"]
    ]
    headings = ("kind of work", "decisions", "right of 100", "90 %", "who should do it")
    _draw(f"{report['model']} beside {report['than']}", headings, rows)
    if again := report["again"]:
        say(
            f"The ceiling: {report['than']}, asked again at {again['n']} of them, gets {100 * again['difference']:+.0f} "
            f"of 100 right ({100 * again['low']:+.0f} to {100 * again['high']:+.0f})."
        )
    else:
        say(f"The ceiling isn't known: {report['than']} itself was not asked again.")
    if report["n_tried"]:
        say(f"At {report['n_tried']} of them, execution decided.")
    say(
        f"Panel: {', '.join(report['panel'])}. Spent ${report['spent_usd']:.2f}, left "
        f"${report['unspent_usd']:.2f}: {report['ended']}."
        + (f" Not judged: {_counted(report['counts'])}." if report["counts"] else "")
    )
    if report["is_play"]:
        say(f"Play: {_PLAY}.")


def show_price(report: Report) -> None:
    """Show what a verdict would cost."""
    say(
        f"It asks {report['model']} at {report['n_decisions']:,} decisions of {report['than']}, and the panel "
        f"({', '.join(report['panel'])}) where the two do something else. If that is {report['share_apart']:.0%} of them, "
        f"it costs about ${report['expected_usd']:.2f}, and ${report['most_usd']:.2f} if it is all. It ends as soon as "
        f"the answer is known, and at your ceiling of ${report['ceiling_usd']:.2f}."
    )
    next_step(f"`replay-pipeline verdict {report['model']}` asks them")


def show_workspace(report: Report) -> None:
    """Show the files at a state, those first that differ from the commit."""
    names = ("state_id", "session_id", "cwd", "branch", "root", "commit", "n_files", "calls")
    _table("Workspace", [(name, report[name]) for name in names])
    table = Table(title="Files", title_justify="left", title_style="bold")
    for name in ("path", "source", "sure", "origin"):
        table.add_column(name, overflow="fold")
    for file in report["files"]:
        sure = ("yes" if file["is_sure"] else "no") if file["exists"] else "no file"
        table.add_row(escape(file["path"]), file["source"], sure, escape(file["origin"][:12]))
    out.print(table)


def show_ingest(report: Report) -> None:
    """Report the rows that were read and skipped, and the next step."""
    names = ("sessions", "turns", "states")
    rows = [(name, report.get(f"n_{name}", report.get(name))) for name in names]
    rows.append(("skipped rows", report.get("skipped", report.get("rows_skipped"))))
    rows.append(("skipped files", report.get("skipped_files", report.get("files_skipped"))))
    rows.append(("redacted", report.get("redactions")))
    fidelity = report.get("fidelity")
    if isinstance(fidelity, float):
        told = f"as long as recorded, within 10 %, in {100 * fidelity:.1f} % of the states"
        rows.append(("prompts", told))
    if "new_states" in report:
        rows.insert(
            0, ("new", f"{report['new_sessions']:,} sessions, {report['new_states']:,} states")
        )
    _table("Ingested", rows)
    out.print(escape(read_words(report)), soft_wrap=True)
    if "written_to" in report:
        out.print(f"Written to {escape(report['written_to'])}.", soft_wrap=True)
    if "new_states" in report:
        next_step("`replay-pipeline estimate` shows the cost of asking teachers")


def read_words(report: Report) -> str:
    """Put in one sentence what an ingestion read, what it left out, and why."""
    files = report.get("files", report.get("new_files"))
    if not files:
        return "Nothing was new: every file had been looked at before."
    skipped = report.get("skipped_files", report.get("files_skipped")) or {}
    rows, used = (report.get(n, report.get(f"new_{n}")) or 0 for n in ("rows", "rows_used"))
    answers = dict(report.get("model_answers", report.get("answers")) or {})
    n_answers, n_states = answers.pop("in_files", 0), answers.pop("states", 0)
    not_states = f" (others: {_counted(answers)})" if any(answers.values()) else ""
    reasons = report.get("skipped", report.get("rows_skipped")) or {}
    words = f"Read {files - sum(skipped.values()):,} of {files:,} files"
    words += f" (not read: {_words(skipped)})" if skipped else ""
    words += f" with {n_answers:,} answers of models, of which {n_states:,} are states{not_states}"
    words += f", from {used:,} of {rows:,} rows"
    return f"{words} (the rest: {_words(reasons)})." if reasons else f"{words}."


def nothing_read(report: Report) -> bool:
    """Return whether there were files to read, and none of them gave anything."""
    files = report.get("files", report.get("new_files"))
    return bool(files) and not report.get("rows_used", report.get("new_rows_used"))


def open_words(work: Report) -> str:
    """Describe the open questions in one line: why they are open, and the cost to finish them."""
    if n := work.get("n_states_never_asked"):
        ceiling = work.get("max_total_usd")
        price = "" if ceiling is None else f"; a run pays at most ${ceiling:.2f} for them"
        never = f"no real teacher was asked at {n:,} states{price}"
        rest = open_words({**work, "n_states_never_asked": 0}) if work["stop_reasons"] else ""
        return f"{never}. At the others: {rest}" if rest else never
    if not work["n_questions_left"]:
        return "no question"
    cost = work["left_usd"]
    price = "" if cost is None else f", about ${cost:.4f} to finish"
    stops = [
        f"{_STOPS[why]} in {n:,} batch{'es' * (n > 1)}"
        for why, n in work["stop_reasons"].items()
        if why in _STOPS
    ]
    why = f" because {' and '.join(stops)}" if stops else ""
    return f"{work['n_questions_left']:,} questions were not sent{why}{price}"


_STOPS = {
    "budget": "the ceiling was reached",
    "stopped": "the run was stopped",
    "teacher_stopped": "a teacher stopped",
}
"""Why questions of a batch wait, by the reason for which its replay ended."""


def show_estimate(report: Report) -> None:
    """Show tokens and dollars by teacher."""
    if not report["teachers"]:
        say("Every question is decided: there is nothing to ask.")
        next_step("`replay-pipeline pairs` shows where the teachers agree on something else")
        return
    headings = ("teacher", "model", "calls", "prompt tokens", "expected $", "at most $")
    rows = [
        (
            row["teacher"],
            row["model"],
            f"{row['n_calls']:,}",
            f"{row['n_prompt_tokens']:,}",
            f"{row['expected_usd']:.4f}",
            f"{row['bound_usd']:.4f}",
        )
        for row in report["teachers"]
    ]
    calls, tokens = (sum(t[n] for t in report["teachers"]) for n in ("n_calls", "n_prompt_tokens"))
    expected, bound = (f"{report[name]:.4f}" for name in ("expected_usd", "bound_usd"))
    rows.append(("all", "", f"{calls:,}", f"{tokens:,}", expected, bound))
    _draw("What the replay would cost", headings, rows, texts=("model",))
    for row in report["teachers"]:
        for note in row["adaptations"]:
            say(f"{row['teacher']}: {note}")
    for source, day in {
        (row["price_source"], row["price_date"][:10]) for row in report["teachers"]
    }:
        if day and date.fromisoformat(day) < datetime.now(UTC).date() - timedelta(days=1):
            say(f"Prices are of {day}: {source} could not be asked again.")
    for said in report["words"]:
        say(f"{said[:1].upper()}{said[1:]}.")
    usd = f"${report['low_usd']:.2f} to ${report['high_usd']:.2f}"
    say(f"In nine of ten cases it costs {usd}, for {_bought(report, report)}.")
    if (covered := report["covered"]) and report["ceiling_usd"] < report["high_usd"]:
        states = f"{covered['n_states']:,} of {report['n_states']:,} states"
        say(
            f"Your ceiling of ${report['ceiling_usd']:.2f} pays for {states}, for {_bought(covered, report)}."
        )
    next_step("`replay-pipeline replay` asks them, and pays no more than the ceiling")


def _bought(found: Report, report: Report) -> str:
    """Return the pairs and positives that some money brings, and how many of them are right."""
    parts = []
    for name, words in (
        ("pairs", "pairs"),
        ("lessons", "lessons in which the agent may be right too"),
        ("positives", "confirmed actions of the agent"),
        ("answers", "answers that nobody confirms"),
    ):
        if name in ("lessons", "answers") and not any(found[name]):
            continue
        low, high = report[f"{name}_right"]
        share = f"{low:.0%}" if round(low, 2) == round(high, 2) else f"{low:.0%} to {high:.0%}"
        parts.append(f"{found[name][0]:,} to {found[name][1]:,} {words} ({share} of them right)")
    n = report["n_answered"]
    *others, last = parts
    words = f"{', '.join(others)}{',' * (len(others) > 1)} and {last}"
    return f"{words}, {f'by the answers at {n:,} states' if n else 'as assumed'}"


_MAX_ROWS = 50
"""Batches in a table for people; `--json` has all of them."""


def _draw_batches(
    title: str,
    names: Sequence[str],
    reports: Report,
    *,
    first: str = "batch",
    headings: Mapping[str, str] | None = None,
    is_summed: bool = False,
) -> None:
    """Draw a figure of each batch in a column, and all of them together in the last row."""
    shown = list(reports.items())[-_MAX_ROWS:]
    if len(shown) < len(reports):
        title += f", the last {len(shown)} of {len(reports):,}"
    rows = [[key, *(_words(report.get(name)) for name in names)] for key, report in shown]
    if is_summed and len(reports) > 1:
        rows.append(["all", *(_words(_sum(reports, name)) for name in names)])
    told = [
        (headings or {}).get(name) or _plain(name.removeprefix("n_").replace("_usd", " $"))
        for name in names
    ]
    _draw(title, (first, *told), rows)


def _sum(reports: Report, name: str) -> Any:
    return sum(report.get(name) or 0 for report in reports.values())


def _added(reports: Report, name: str) -> dict[str, int]:
    """Add up counts by name over all batches."""
    from replay_pipeline.stages.receipts import added

    return added(report.get(name) or {} for report in reports.values())


def show_replay(reports: Report) -> None:
    """Show calls and dollars by batch."""
    _tell_others(reports.values())
    n_failed = _sum(reports, "n_failed")
    n = n_failed + _sum(reports, "n_answers")
    if 2 * n_failed > n:
        usd = _sum(reports, "failed_usd")
        say(
            f"{n_failed:,} of {n:,} questions got no answer that can be used ({_words(_added(reports, 'errors'))}). "
            f"${usd:.4f} is booked for them, at the most that each may have cost where nobody can tell."
        )
    for name in {each for report in reports.values() if (each := report.get("doubted_teacher"))}:
        say(
            f"{name} takes the agent's action where other teachers agree on another one, so a second "
            "teacher was asked to confirm."
        )
    figures = ("n_sent", "n_cached", "n_failed", "newly_spent_usd", "stop_reason")
    _draw_batches("Replayed", figures, reports, headings={"newly_spent_usd": "$ now"})
    if _sum(reports, "n_rehearsed"):
        say(f"Play: {_PLAY}.")
    if not _sum(reports, "n_sent"):
        say("Nothing was asked now.")
    if n_left_out := _sum(reports, "n_states_incomplete"):
        say(
            f"{n_left_out:,} states were left out: their prompts lack something that the agent saw, such "
            "as an image. The setting `replay.asks_incomplete` asks there too."
        )
    n_looks, n_books = (_sum(reports, f"n_states_{why}") for why in ("looks", "books"))
    if n_looks or n_books:
        say(
            f"Not asked: {n_looks:,} states at which the agent only looked, and {n_books:,} at which it "
            "kept its notes. They are context of what it did then (`replay.ask_at`)."
        )
    say(f"Asked at {_covered(reports)}.")
    for report in reports.values():
        for name, why in (report.get("stopped_teachers") or {}).items():
            say(f"{name} was asked no more: {why}")
        if until := report.get("held_until"):
            say(
                f"Calls whose outcome is not known hold ${report['unknown_usd']:.4f} until {until}; from "
                "then on the same command settles them and goes on with what they leave."
            )
    if n_short := sum(report["stop_reason"] == "budget" for report in reports.values()):
        say(
            f"The ceiling was reached in {n_short} of {len(reports)} batches. The same command "
            "goes on where it stopped; --budget sets another ceiling."
        )


def _tell_others(reports: Iterable[Report]) -> None:
    """Report first where a gateway had another model answer than the one that was asked."""
    others: Counter[tuple[str, str]] = Counter()
    for report in reports:
        for name, counts in (report.get("answered_by_others") or {}).items():
            others.update({(name, model): n for model, n in counts.items()})
    for (name, model), n in others.items():
        say(f"{n:,} answers of {name} come from another model, {model}, and vote as that one's.")


def _covered(reports: Report) -> str:
    """Return how much of what there is was asked about, over all batches."""
    found = [report.get("coverage") or {} for report in reports.values()]
    by_name: dict[str, Counter[str]] = {"projects": Counter(), "kinds": Counter()}
    for what, counts in by_name.items():
        for report in reports.values():
            counts.update((report.get("asked_by") or {}).get(what, {}))
    parts = []
    for what in ("states", "sessions", "projects", "kinds"):
        asked, everything = (
            sum(each[what][part] for each in found if what in each) for part in ("asked", "all")
        )
        if counts := by_name.get(what):  # one may be in several batches
            asked, everything = sum(n > 0 for n in counts.values()), len(counts)
        word = "kinds of decision" if what == "kinds" else what
        parts.append(f"{asked:,} of {everything:,} {word}")
    left_out = sorted(kind for kind, n in by_name["kinds"].items() if not n)
    nobody = f"; nobody was asked at {', '.join(left_out)}" if left_out else ""
    return ", ".join(parts) + nobody


def draw_facts(title: str, report: Report) -> None:
    """Show the figures of a report, without its lists."""
    _table(title, [(key, value) for key, value in report.items() if not isinstance(value, list)])


def show_strengths(reports: Report) -> None:
    """Compare the strength of each teacher with the agent's, as estimated from their agreement."""
    from replay_pipeline.judge.strengths import strengths

    found = [each.row() for each in strengths(reports.values())]
    if not found:
        return
    names = [name for name in found[0] if name not in _PLACES]
    _draw("Teachers, by estimate", names, [[row[name] for name in names] for row in found])
    for row in found:
        places = [f"{name} {row[name]}" for name in _PLACES if row[name] != "nothing"]
        if places:
            say(f"{row['teacher']} is {', '.join(places)}.")


_PLACES = ("stronger at", "weaker at")
"""What of a teacher's strength is told in a sentence."""


def show_pairs(reports: Report, *, is_last: bool = True) -> None:
    """Show pairs by batch, and an estimate of how many are right."""
    _draw_batches(
        "Pairs",
        ("n_states", "n_consensus", "n_agreement", "n_lessons", "n_answers", "n_pairs"),
        {
            key: {"n_lessons": 0, "n_answers": 0, **r, "n_states": sum(r["outcomes"].values())}
            for key, r in reports.items()
        },
        headings={
            "n_consensus": "teachers agree",
            "n_agreement": "with the agent",
            "n_lessons": "lessons",
            "n_answers": "answers of one",
        },
        is_summed=True,
    )
    say(f"States by outcome: {_counted(_added(reports, 'outcomes'))}.")
    say(f"Pairs by source: {_counted(_added(reports, 'pairs_by_source'))}.")
    if n := _sum(reports, "n_lessons"):
        say(f"{n:,} lessons are no pairs: the agent may be right there too.")
    if n := _sum(reports, "n_rejected_in_review"):
        say(f"{n:,} pairs were rejected in review.")
    from replay_pipeline.judge.precision import PrecisionEvidence

    show_strengths(reports)
    poll = PrecisionEvidence.pooled(
        report["poll"] for report in reports.values() if "poll" in report
    )
    say(f"How many are right: {poll.precision().words()}.")
    if not is_last:
        return
    next_step(
        "mark forty in `replay-pipeline look`, then give `pairs --marks FILE`"
        if poll.n_pairs and not poll.checks
        else "`replay-pipeline normalize` keeps the pairs that are fit to publish"
    )


def show_normalize(reports: Report) -> None:
    """Show kept and dropped pairs by batch, with the operators that dropped them."""
    _draw_batches("Normalized", ("n_kept", "n_dropped"), reports, is_summed=True)
    if dropped := _added(reports, "dropped"):
        say(f"Dropped by: {_counted(dropped)}.")
    next_step("`replay-pipeline publish` makes the dataset from the kept pairs")


def show_publish(report: Report, *, title: str = "Published") -> None:
    """Show the results of a publication, and the result of each check that it passed."""
    checks = report.get("checks") or {}
    # `dataset` names the folder already.
    shown = {k: v for k, v in report.items() if k not in ("checks", "folder")}
    draw_facts(title, shown | checks)


def show_verify(report: Report) -> None:
    """Report damaged files, and the number of intact ones."""
    draw_facts("Looked at", {k: v for k, v in report.items() if k != "damaged"})
    for damage in report["damaged"]:
        out.print(f"{escape(damage['path'])}: {damage['why']}", soft_wrap=True)
    if report["damaged"]:
        next_step(
            "delete what is damaged; `replay-pipeline run` makes it again and pays for nothing twice"
        )
    else:
        out.print("Nothing is damaged.")


def show_train(report: Report) -> None:
    """Show the results of a training in sentences, and its loss as a small plot."""
    _tell_training(report, report.get("curves") or {})
    if live := report.get("channels_live"):
        off = report.get("channels_off") or {}
        # Other reasons are among the sentences above.
        told = "".join(f"; {n} is off: {why}" for n, why in off.items() if why.endswith("is 0"))
        say(f"Channels that taught it: {', '.join(live)}{told}.")
    if n := report.get("cut_prompts"):
        say(
            f"{n} prompts were longer than `max_prompt_tokens`, so their oldest messages were left out."
        )
    next_step("`replay-pipeline look` shows the curves and the new actions")


_KINDS: dict[str | None, str] = {
    None: "real teachers",
    "sample": "the sample's recorded teachers",
    "rehearsal": "a rehearsal, which is play",
}


def show_status(report: Report) -> None:
    """Report finished work and its cost."""
    if not report["batches"]:
        out.print("No sessions yet: run `replay-pipeline ingest` first.")
        return
    from replay_pipeline.stages import chain

    stages = [stage for stage in chain.by_batch() if stage.told]
    headings = {stage.name: _plain(stage.told.removeprefix("n_")) for stage in stages}
    names = [stage.name for stage in stages]
    if rehearsed := report.get("rehearsed"):
        names.insert(names.index("replay") + 1, "rehearsal")
        headings["rehearsal"] = "made up"
    _draw_batches("Batches", names, report["batches"], headings=headings, is_summed=True)
    if rehearsed:
        say(f"Play in {_words(rehearsed)}: {_PLAY}.")
    ledger = report["ledger"]
    _table(f"Money of {_KINDS[report['played']]}", _money(ledger))
    scopes = [each for each in ledger.get("scopes") or () if each["limit_usd"] is not None]
    # One run, or one batch of it, is no news; what they share is.
    _draw_limits([each for each in scopes if not each["scope"].startswith(("run:", "partition:"))])
    if "open" in report:
        say(f"Left to ask: {open_words(report['open'])}.")
    if fidelity := _fidelity_words(report.get("fidelity") or {}):
        say(fidelity)
    if dataset := report.get("dataset"):
        from replay_pipeline.publish import in_words

        say(in_words(dataset.get("blind")))
    next_step(_next_of(report, names))


def _money(ledger: Report) -> list[tuple[str, str]]:
    """Return what was spent and on what; what there is nothing of is left out."""
    until = f" until {ledger['held_until']}" if ledger.get("held_until") else ""
    rows = [("spent", f"${ledger.get('spent_usd') or 0.0:.4f}")]
    for name, words, more in (
        ("held_usd", "held", " for calls under way"),
        ("unknown_usd", "unknown", f" for calls whose outcome is not known{until}"),
        ("disputed_usd", "disputed", f" of {ledger.get('n_disputed', 0):,} calls"),
    ):
        if usd := ledger.get(name):
            rows.append((words, f"${usd:.4f}{more}"))
    for kind, words in (("teacher", "by teacher"), ("day", "by day")):
        found = [
            each for each in ledger.get("scopes") or () if each["scope"].startswith(f"{kind}:")
        ]
        told = [f"{each['scope'].partition(':')[2]} ${each['spent_usd']:.4f}" for each in found]
        if told:
            more = len(told) - _MOST_NAMED
            rows.append((words, ", ".join(told[-_MOST_NAMED:]) + (f", {more} before" * (more > 0))))
    rows += [(name, _counted(ledger[name])) for name in ("calls", "errors") if ledger.get(name)]
    return [*rows, ("ledger", near(str(ledger.get("ledger"))))]


def near(path: str) -> str:
    """Return a path relative to the current folder, if it is below that folder."""
    here = f"{Path.cwd()}{os.sep}"
    return path.removeprefix(here)


def _draw_limits(scopes: Sequence[Report]) -> None:
    """Draw what has a limit, with what was spent of it; what there is nothing of has no column."""
    if not scopes:
        return
    rows = {scope["scope"].replace(":", " "): scope for scope in scopes}
    always = ("spent_usd", "limit_usd")
    names = [
        name
        for name in ("spent_usd", "held_usd", "unknown_usd", "overrun_usd", "limit_usd")
        if name in always or any(row.get(name) for row in rows.values())
    ]
    headings = {name: name.removesuffix("_usd") for name in names}
    title = "Limits, in US dollars"
    _draw_batches(title, names, rows, first="counts for", headings=headings)


def _fidelity_words(fidelity: Mapping[str, Report | None]) -> str:
    """Return how many prompts are about as long as they were, and with which client the fewest."""
    from replay_pipeline.stages.receipts import shares_near

    clients = shares_near(fidelity.values())
    n_all = sum(n for n, _ in clients.values())
    if not n_all:
        return ""
    share = sum(alike for _, alike in clients.values()) / n_all
    words = f"Prompts as long as recorded, within 10 %: {share:.0%} of {n_all:,} states"
    worst, (n, alike) = min(clients.items(), key=lambda each: each[1][1] / max(each[1][0], 1))
    if alike < n and len(clients) > 1:
        words += f"; the fewest with {worst}: {alike / n:.0%} of {n:,}"
    return words + "."


def _next_of(report: Report, stages: Sequence[str]) -> str:
    """Return which command does what is not done yet."""
    done = report["batches"].values()
    steps = {
        "replay": "`replay-pipeline estimate` shows the cost of asking teachers",
        "pairs": "`replay-pipeline pairs` finds where the teachers agree on something else",
        "normalize": "`replay-pipeline normalize` keeps the pairs that are fit to publish",
    }
    for stage in stages:
        either = {stage, "rehearsal"} if stage == "replay" else {stage}
        if stage in steps and not all(either & row.keys() for row in done):
            return steps[stage]
    if not report.get("dataset"):
        return "`replay-pipeline publish` makes the dataset"
    return "`replay-pipeline look` shows all of it on one page"


def show_stale(report: Report) -> None:
    """Report stale results, the reason for each, and the cost of redoing them."""
    from replay_pipeline.stages import chain

    if not report["batches"]:
        out.print("Nothing is stale: code and settings would make the same of everything.")
        return
    batches: dict[tuple[str, str], int] = {}
    for stage in chain.STAGES:
        for row in report["batches"].values():
            if why := row.get(stage.name):
                key = (stage.name, _words(why))
                batches[key] = batches.get(key, 0) + 1
    rows = [(stage, f"{n:,}", why) for (stage, why), n in batches.items()]
    _draw("Stale, and why", ("stage", "batches", "because of"), rows, texts=("because of",))
    if why := report["no_price"]:
        price = f"what it costs is not known ({why})"
    elif cost := report["cost"]:
        n_calls = sum(row["n_calls"] for row in cost["teachers"])
        price = f"{n_calls:,} new questions for about ${cost['expected_usd']:.4f}"
    else:
        price = "no question changes, so it costs nothing"
    say(f"Paid answers are kept. Doing it again: {price}.")
    next_step("`replay-pipeline run` does it again")


def show_ranked(report: Report, *, is_last: bool = True) -> None:
    """Show three lines for each pair: its probability and doubts, then the first difference."""
    out.print("[bold]Pairs to look at first[/]")
    for pair in report["pairs"]:
        p_better = "" if pair["p_better"] is None else f"{pair['p_better']:.0%} right"
        where = pair["differ"]
        name = pair["state_id"][:_ID_CHARS]
        head = (name, p_better, where["alike"], "; ".join(pair["doubts"]))
        _line(" · ".join(each for each in head if each), "")
        _line(f"  − {where['rejected']}", "red")
        _line(f"  + {where['chosen']}", "green")
    if report["pairs"] and is_last:
        next_step(
            f"`replay-pipeline trace {report['pairs'][0]['state_id'][:_ID_CHARS]}` shows all of one"
        )


_ID_CHARS = 12
"""Of the id of a state, so much names it: `trace` takes a beginning."""


def _line(text: str, style: str) -> None:
    """Print one line, of which the end is cut off where the terminal is too narrow."""
    line = printable(text).replace("\n", " ")
    out.print(Text(line, style=style), overflow="ellipsis", no_wrap=True, highlight=False)


def show_findings(report: Report) -> None:
    """Show one line per check."""
    for finding in report["findings"]:
        mark = "[green]ok[/]" if finding["ok"] else "[red]no[/]"
        out.print(f"{mark}  {escape(finding['what'])}: {escape(finding['detail'])}")


def show_teachers(report: Report) -> None:
    """Show one row for each teacher, and each problem once below the table."""
    problems: dict[str, list[str]] = {}
    headings = ("teacher", "model", "$ per M in / out", "may train", "state")
    rows = []
    for row in report["teachers"]:
        prices = (row["prompt_usd_per_mtok"], row["completion_usd_per_mtok"])
        rows.append(
            (
                row["teacher"],
                row["model"],
                "unknown" if None in prices else f"{prices[0]:.3g} / {prices[1]:.3g}",
                {True: "yes", False: "no", None: "not known"}[row["is_distillable"]],
                "no" if row["problem"] else "ok",
            )
        )
        if row["problem"]:
            problems.setdefault(row["problem"], []).append(row["teacher"])
    _draw("Teachers", headings, rows, texts=("model",))
    for problem, names in problems.items():
        say(f"{', '.join(names)}: {problem}")


def show_lost_calls(report: Report) -> None:
    """Show one line per call whose outcome isn't known."""
    for row in report["lost_calls"]:
        out.print(
            f"{row['sent_at']}  {row['teacher']}  {row['state_id']}: {row['why']}; "
            f"${row['reserved_usd']:.6f} reserved; {row['what']}",
            markup=False, soft_wrap=True,
        )  # fmt: skip
    if not report["lost_calls"]:
        out.print("No call is lost.")
