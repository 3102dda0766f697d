"""What a person sees in a terminal: bars while work goes on, and a table at its end."""

import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rich import markup
from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from replay_pipeline.redaction.printable import printable
from replay_pipeline.types import Progress

Report = Mapping[str, Any]


def escape(text: str) -> str:
    """`text` for a console: nothing in it is taken for a command, of rich or of the terminal."""
    return markup.escape(printable(text))


class PrintableFormatter(logging.Formatter):
    """Log lines without terminal escapes."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        return printable(super().format(record))


out = Console(emoji=False)
err = Console(stderr=True, emoji=False)


@contextmanager
def progress_bars() -> Iterator[Callable[[Progress], None]]:
    """A bar per stage in a terminal; where there is none, a plain line at every tenth."""
    bars = Bars(
        TextColumn("{task.description:<10}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TextColumn("{task.fields[usd]}"),
        TimeElapsedColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )
    tasks: dict[str, TaskID] = {}
    tenths: dict[str, int] = {}
    stages: dict[str, _Stage] = {}

    def show(progress: Progress) -> None:
        whole = stages.setdefault(progress.stage, _Stage()).whole(progress)
        if not err.is_terminal:
            _tell_tenth(whole, tenths)
            return
        if whole.stage not in tasks:
            tasks[whole.stage] = bars.add_task(whole.stage, amount="", usd="")
        bars.update(
            tasks[whole.stage], completed=whole.n_done, total=whole.n_total,
            amount=_amount(whole), usd=_dollars(whole),
        )  # fmt: skip

    with bars:
        yield show


@dataclass
class _Stage:
    """A stage as one bar, however many batches it is done in: it never goes back."""

    n_total: int = 0
    limit_usd: float | None = None
    parts: dict[str, Progress] = field(default_factory=dict)

    def whole(self, progress: Progress) -> Progress:
        """Take in how far a part has come, and give how far all of it has."""
        if progress.limit_usd is not None:
            self.limit_usd = progress.limit_usd
        if progress.part is None:
            self.n_total = progress.n_total or 0
            if not self.parts:
                return progress
        else:
            self.parts[progress.part] = progress
        parts = self.parts.values()
        costs = [part.cost_usd for part in parts if part.cost_usd is not None]
        return replace(
            progress,
            n_done=sum(part.n_done for part in parts),
            n_total=max(self.n_total, sum(part.n_total or 0 for part in parts)) or None,
            cost_usd=sum(costs) if costs else None,
            limit_usd=self.limit_usd,
        )


def _amount(progress: Progress) -> str:
    unit, size = (" MB", 1e6) if progress.unit == "bytes" else ("", 0)
    done, total = (
        f"{n / size:.1f}" if size else f"{n:,}" for n in (progress.n_done, progress.n_total or 0)
    )
    return f"{done} of {total}{unit}" if progress.n_total else f"{done}{unit}"


def _dollars(progress: Progress) -> str:
    if progress.cost_usd is None:
        return ""
    of = "" if progress.limit_usd is None else f" of ${progress.limit_usd:.2f}"
    return f"${progress.cost_usd:.4f}{of}"


_WORTH_TELLING = 5_000_000
"""Bytes of a stage from which on plain lines tell of it."""


def _tell_tenth(progress: Progress, tenths: dict[str, int]) -> None:
    """Print a line where a stage has come a tenth further since the last one, or ten steps."""
    if not (progress.n_done or progress.cost_usd is not None):
        return
    if progress.unit == "bytes" and (progress.n_total or 0) < _WORTH_TELLING:
        return  # it is over before the line could be read
    tenth = 10 * progress.n_done // progress.n_total if progress.n_total else progress.n_done // 10
    if tenths.get(progress.stage) != tenth:
        tenths[progress.stage] = tenth
        usd = f", {_dollars(progress)}" if progress.cost_usd is not None else ""
        err.print(f"{progress.stage} {_amount(progress)}{usd}", highlight=False)


def print_report(report: Report, *, as_json: bool, show: Callable[[Report], None]) -> None:
    """Print `report` as JSON for a script, or as `show` draws it for a person."""
    if as_json:
        sys.stdout.write(json.dumps(report, indent=1, default=str) + "\n")
    else:
        show(report)


def _table(title: str, rows: list[tuple[str, Any]]) -> None:
    table = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    table.add_column(style="cyan")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(escape(name), escape(_words(value)))
    out.print(table)


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(each)}" for key, each in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_words, value)) or "none"
    if isinstance(value, float):
        return f"{value:,.4f}"
    return "none" if value is None else str(value)


_PLAY = "these answers were made up in a rehearsal; nothing of it goes to the Hub"


def show_summary(summary: Report) -> None:
    """The table at the end of a run."""
    train = summary["train"]
    rows: list[tuple[str, Any]] = [
        ("sessions", f"{summary['sessions']} in {summary['batches']} batches"),
        ("states", f"{summary['states']} (of {summary['turns']} turns)"),
        (
            "calls",
            f"{summary['calls']} now; {summary['answers'] + summary['failed_calls']} questions "
            f"decided in all: {summary['answers']} answers, {summary['failed_calls']} failed",
        ),
        (
            "dollars",
            f"${summary['newly_spent_usd']:.4f} now, ${summary['spent_usd']:.4f} in all, "
            f"ceiling ${summary['max_total_usd']:.2f}",
        ),
        *(
            [("play", f"{summary['rehearsed_answers']:,} answers: {_PLAY}")]
            if summary["rehearsed_answers"]
            else []
        ),
        ("left", open_words(summary["open"])),
        (
            "agreements",
            f"{summary['agreements']} ({summary['agreements_with_student']} with the student)",
        ),
        ("pairs", f"{summary['pairs']}, {summary['normalized_pairs']} kept"),
        ("dropped", summary["dropped"]),
        ("dataset", f"{summary['dataset']} ({_words(summary['rows_by_split'].get('pairs', {}))})"),
        *([("checks", summary["checks"])] if summary.get("checks") else []),
        *([("stale", _stale_words(summary["stale"]))] if summary.get("stale") else []),
    ]
    if train:
        rows += [
            (
                "loss",
                f"{train['loss_first']:.4f} → {train['loss_last']:.4f} in {train['steps']} steps",
            ),
            ("channels", train["channels_live"]),
        ]
    if train and "blank_prompt_accuracy_before" in train:
        rows += [("accuracy", _accuracy(train)), ("learned", _learned(train))]
    if train and "valid_calls_after" in train:
        rows.append(("acts", _acts(train)))
    rows.append(("seconds", {k: f"{v:.1f}" for k, v in summary["seconds"].items()}))
    _table("replay-pipeline", rows)


def _stale_words(batches: Report) -> str:
    """Say of each stage why what it made is stale, in how many batches."""
    found = Counter(
        f"{stage}: {why}"
        for row in batches.values()
        for stage, reasons in row.items()
        for why in reasons
    )
    return "; ".join(f"{why} ({n})" for why, n in found.items())


def _accuracy(train: Report) -> str:
    """Accuracy on held-out pairs before and after, with the true prompt and with others."""
    names = {"preference": "true", "blank_prompt": "blank", "shuffled_prompt": "another pair's"}
    return ", ".join(
        f"{prompt} prompt {train[f'{name}_accuracy_before']:.2f} → "
        f"{train[f'{name}_accuracy_after']:.2f}"
        for name, prompt in names.items()
    )


def _learned(train: Report) -> str:
    """Say what reading the prompt is worth on held-out pairs, and how often the model is right."""
    return (
        f"{100 * train['prompt_gain_after']:+.1f} points by reading the prompt: right in "
        f"{100 * train['preference_accuracy_after']:.1f} % of {train['held_out_pairs']} held-out "
        f"pairs, with a blank prompt in {100 * train['blank_prompt_accuracy_after']:.1f} %"
    )


def _acts(train: Report) -> str:
    """Say what the model does by itself at held-out states, before and after."""
    low, high = train["intervals_after"]["consensus_rate"]
    return ". ".join(
        [
            f"takes the consensus action at {100 * train['consensus_rate_before']:.0f} → "
            f"{100 * train['consensus_rate_after']:.0f} % of {train['held_out_states']} held-out "
            f"states ({100 * low:.0f} to {100 * high:.0f}), writes well-formed calls at "
            f"{100 * train['valid_calls_before']:.0f} → {100 * train['valid_calls_after']:.0f} %",
            *train["findings"],
        ]
    )


def show_look(overview: Report) -> None:
    """Show what the sessions hold, largest first."""
    total, replay = overview["total"], overview["replay"]
    _table(
        "Sessions",
        [
            ("sessions", f"{total['sessions']}, {total['subagents']} of them of subagents"),
            ("projects", {each["name"]: each["sessions"] for each in overview["projects"]}),
            ("dates", f"{total['first']} to {total['last']}"),
            ("decisions", f"{total['states']:,} in {total['turns']:,} turns"),
            ("tokens", {name: f"{n:,}" for name, n in overview["tokens"].items()}),
            ("cost", _cost_words(overview)),
            ("outcomes", overview["outcomes"]),
            ("error kinds", overview["error_kinds"]),
            ("tools", overview["tools"]),
            ("redacted", overview["redactions"]),
            ("skipped rows", overview["skipped"]),
            ("skipped files", overview["skipped_files"]),
        ],
    )
    _draw_batches(
        "Models", ("turns", "tokens", "cost_usd"),
        {each["model"]: each for each in overview["models"]}, first="model",
    )  # fmt: skip
    _draw_batches(
        "Fidelity of prefixes", ("n_states", "share_within_10_percent"),
        overview["fidelity"], first="client",
    )  # fmt: skip
    out.print(escape(replay["words"]), soft_wrap=True)


def show_workspace(report: Report) -> None:
    """Show the files at a state, those first that are not as the commit has them."""
    names = ("state_id", "session_id", "cwd", "branch", "root", "commit", "n_files", "calls")
    _table("Workspace", [(name, report[name]) for name in names])
    table = Table(title="Files", title_justify="left", title_style="bold")
    for name in ("path", "source", "sure", "origin"):
        table.add_column(name, overflow="fold")
    for file in report["files"]:
        sure = ("yes" if file["is_sure"] else "no") if file["exists"] else "no file"
        table.add_row(escape(file["path"]), file["source"], sure, escape(file["origin"][:12]))
    out.print(table)


def show_survival(report: Report) -> None:
    """Show how many edits were undone, were committed and are still there."""
    n_edits = report["n_edits"]
    names = {
        "n_undone_in_session": "at least half undone in the session",
        "n_committed": "in a later commit of the branch",
        "n_still_there": "at least half in its newest commit",
    }
    rows = [(words, f"{report[name]:,} of {n_edits:,}") for name, words in names.items()]
    _table("Edits that added lines", rows)


def show_checks(report: Report) -> None:
    """Show proposed checks as settings."""
    out.print("[workspaces.checks]", markup=False)
    for root, commands in sorted(report.items()):
        first, *others = commands or ["", "nothing that is known checks it"]
        line = f"{json.dumps(root)} = {json.dumps(first)}" if first else f"# {json.dumps(root)}"
        out.print(escape(line + (f"  # or: {', '.join(others)}" if others else "")), soft_wrap=True)


def show_fidelity(report: Report) -> None:
    """Show what rebuilt files reproduce, by project and tool."""
    for project, tools in report["projects"].items():
        table = Table(title=escape(project), title_justify="left", title_style="bold")
        for name in ("call", "recorded", "reproduced", "share", "whole file", "otherwise because"):
            table.add_column(name, overflow="fold")
        for tool, row in sorted(tools.items()):
            share = f"{100 * row['n_same'] / row['n']:.1f} %"
            why = _words(dict(row["reasons"].most_common()))
            numbers = [str(row["n"]), str(row["n_same"]), share, str(row["n_exact"])]
            table.add_row(tool, *numbers, why)
        out.print(table)


def _cost_words(overview: Report) -> str:
    words = f"${overview['cost_usd']:,.2f} at list prices of {overview['prices_of']}"
    unpriced = ", ".join(overview["models_without_price"])
    return f"{words}; without a price, so not in it: {unpriced}" if unpriced else words


def show_ingest(report: Report) -> None:
    """What was read, what was skipped, and what to do next."""
    names = ("sessions", "turns", "states")
    rows = [(name, report.get(f"n_{name}", report.get(name))) for name in names]
    rows.append(("skipped rows", report.get("skipped", report.get("rows_skipped"))))
    rows.append(("skipped files", report.get("skipped_files", report.get("files_skipped"))))
    rows.append(("redacted", report.get("redactions")))
    fidelity = report.get("fidelity")
    if isinstance(fidelity, float):
        rows.append(("fidelity", f"{100 * fidelity:.1f} % of prefixes within 10 % of the recorded"))
    if "new_states" in report:
        rows.insert(0, ("new", f"{report['new_sessions']} sessions, {report['new_states']} states"))
    _table("Ingested", rows)
    if "new_states" in report and not report["new_states"]:
        out.print("Nothing was new: these sessions had been read before.")
    if "written_to" in report:
        out.print(f"Written to {escape(report['written_to'])}.", soft_wrap=True)
    if "new_states" in report:
        out.print("Next: `replay-pipeline estimate` says what asking teachers would cost.")


def open_words(work: Report) -> str:
    """Say in a line what is left to ask, why it stopped, and what finishing costs."""
    reasons = _words(work["stop_reasons"])
    if n := work.get("n_never_asked"):
        ceiling = work.get("max_total_usd")
        price = "" if ceiling is None else f"; a run pays at most ${ceiling:.2f} for them"
        never = f"up to {n:,} questions that no real teacher was asked{price}"
        rest = open_words({**work, "n_never_asked": 0}) if work["stop_reasons"] else ""
        return f"{never}. Of those that were: {rest}" if rest else never
    if not work["n_questions_left"]:
        return f"no question ({reasons})"
    cost = work["left_usd"]
    price = "" if cost is None else f", about ${cost:.4f} to finish"
    return f"{work['n_questions_left']:,} questions were not sent ({reasons}){price}"


def show_estimate(report: Report) -> None:
    """Tokens and dollars by teacher."""
    table = Table(title="What the replay would cost", title_justify="left", title_style="bold")
    for name in ("teacher", "model", "calls", "prompt tokens", "expected $", "at most $"):
        table.add_column(name, justify="left" if name in ("teacher", "model") else "right")
    for row in report["teachers"]:
        table.add_row(
            escape(row["teacher"]),
            escape(row["model"]),
            f"{row['n_calls']:,}",
            f"{row['n_prompt_tokens']:,}",
            f"{row['expected_usd']:.4f}",
            f"{row['bound_usd']:.4f}",
        )
    table.add_row("all", "", "", "", f"{report['expected_usd']:.4f}", f"{report['bound_usd']:.4f}")
    out.print(table)
    for row in report["teachers"]:
        for note in row["adaptations"]:
            out.print(f"{escape(row['teacher'])}: {escape(note)}", soft_wrap=True)
        if row["n_logprobs"]:
            out.print(
                f"{escape(row['teacher'])}: {row['n_logprobs']:,} token probabilities, "
                "at no charge beside the tokens",
                soft_wrap=True,
            )
    for said in report["prospect"]["words"]:
        out.print(f"{escape(said)}.", highlight=False, soft_wrap=True)
    if words := _next_words(report):
        out.print(escape(words), highlight=False, soft_wrap=True)
    for heading, each in (("as set", report), ("with the recommended gates", report["gated"])):
        if each and each["buys"]:
            out.print(
                f"{heading}: ${each['low_usd']:.2f} to ${each['high_usd']:.2f}; "
                f"{_bought(each, report['ceiling_usd'])}",
                soft_wrap=True,
            )


def _next_words(report: Report) -> str | None:
    """Say what more money would bring, and what the last pair of it costs."""
    found = report["prospect"]["next"]
    if not found or not found["high"]:
        return None
    last = f"; the last of them costs ${found['usd_per_last']:.2f}" if found["usd_per_last"] else ""
    return (
        f'Spent by value (`gates = ["value"]`), the next ${found["usd"]:.2f} would bring '
        f"{found['low']:,.0f} to {found['high']:,.0f} right pairs{last}. Stop when that is more than a "
        "pair is worth to you."
    )


def _bought(estimate: Report, usd: float) -> str:
    """Say what so much money buys of what was estimated."""
    n_all = estimate["n_states"]
    n_states = min(n_all, int(n_all * usd / estimate["expected_usd"]))
    seen = estimate["prospect"]
    low, high = (round(n_states * seen[end]) for end in ("low", "high"))
    basis = f"by the answers at {seen['n_states']:,}" if seen["n_states"] else "assumed"
    return (
        f"your ceiling of ${usd:.2f} asks {n_states:,} of {n_all:,} states, for "
        f"{low:,} to {high:,} right pairs ({basis})"
    )


_HEADINGS = {"dropped": "dropped by"}
"""Columns whose name does not say enough."""
_EXPLAINED = {
    "cut_prompts": "{n} prompts were longer than `max_prompt_tokens`, so their oldest messages were "
    "left out."
}
"""Figures of a training that need a sentence."""


_MAX_ROWS = 50
"""Batches in a table for people; `--json` has all of them."""


def _draw_batches(
    title: str, names: tuple[str, ...], reports: Report, *, first: str = "batch"
) -> None:
    shown = list(reports.items())[-_MAX_ROWS:]
    if len(shown) < len(reports):
        title += f", the last {len(shown)} of {len(reports):,}"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(first, no_wrap=True)
    for name in names:
        heading = _HEADINGS.get(name) or name.removeprefix("n_").replace("_usd", " $").replace(
            "_", " "
        )
        longest_word = max(map(len, heading.split()))
        table.add_column(heading, overflow="fold", min_width=longest_word)
    for key, report in shown:
        table.add_row(escape(key), *(escape(_words(report.get(name))) for name in names))
    out.print(table)


def show_replay(reports: Report) -> None:
    """Calls and dollars by batch."""
    figures = ("n_sent", "n_cached", "n_failed", "newly_spent_usd", "stop_reason")
    _draw_batches("Replayed", figures, reports)
    if any(report.get("n_rehearsed") for report in reports.values()):
        out.print(f"Play: {_PLAY}.", soft_wrap=True)
    if not any(report["n_sent"] for report in reports.values()):
        out.print("Nothing was asked now.")
    out.print(f"Asked at {_covered(reports)}.", highlight=False, soft_wrap=True)
    for report in reports.values():
        for name, why in (report.get("stopped_teachers") or {}).items():
            out.print(f"{escape(name)} was asked no more: {escape(why)}", soft_wrap=True)
        if until := report.get("held_until"):
            out.print(
                f"Calls whose outcome is not known hold ${report['unknown_usd']:.4f} until {until}; from "
                "then on the same command settles them and goes on with what they leave.",
                soft_wrap=True,
            )
    if n_short := sum(report["stop_reason"] == "budget" for report in reports.values()):
        out.print(
            f"The ceiling was reached in {n_short} of {len(reports)} batches. The same command "
            "goes on where it stopped; --budget sets another ceiling.",
            soft_wrap=True,
        )


def _covered(reports: Report) -> str:
    """How much of what there is was asked about, over all batches."""
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


def _draw_facts(title: str, report: Report) -> None:
    _table(title, [(key, value) for key, value in report.items() if not isinstance(value, list)])


def show_strengths(reports: Report) -> None:
    """How strong each teacher is beside the agent, as far as who agrees with whom tells."""
    from replay_pipeline.reliability import shared_errors, strengths

    found = [each.row() for each in strengths(reports.values())]
    if not found:
        return
    table = Table(title="Teachers, by estimate", title_justify="left", title_style="bold")
    for name in found[0]:
        table.add_column(name, overflow="fold")
    for row in found:
        table.add_row(*(escape(cell) for cell in row.values()))
    out.print(table)
    if (share := shared_errors(reports.values())) is not None:
        out.print(
            f"Where they err, {share:.0%} make the mistake that others make there too.",
            highlight=False,
            soft_wrap=True,
        )


def show_pairs(reports: Report) -> None:
    """Pairs by batch, and how many of them are right."""
    figures = ("n_pairs", "pairs_by_source", "outcomes", "n_rejected_in_review")
    _draw_batches("Pairs", figures, reports)
    from replay_pipeline.reliability import Poll

    show_strengths(reports)
    poll = Poll.pooled(report["poll"] for report in reports.values() if "poll" in report)
    words = poll.precision().words()
    for key, report in reports.items():
        for said in (report.get("reliability") or {}).get("words", ()):
            out.print(f"{escape(key)}: {escape(said)}.", highlight=False, soft_wrap=True)
    out.print(f"How many are right: {words}.", highlight=False, soft_wrap=True)
    if poll.n_pairs and not poll.checks:
        out.print("`replay-pipeline review --sample 40` shows those whose check tells most.")


show_samples = partial(
    _draw_batches, "Sampled", ("n_states", "n_samples", "agreement_rate", "n_pairs", "n_positives")
)
show_normalize = partial(_draw_batches, "Normalized", ("n_kept", "n_dropped", "dropped"))
show_control = partial(_draw_facts, "Control")
show_upgrade = partial(_draw_facts, "Brought over")


def show_publish(report: Report) -> None:
    """Show what a publication did, and the verdict of each check that it stood."""
    checks = report.get("checks") or {}
    _draw_facts("Published", {k: v for k, v in report.items() if k != "checks"} | checks)


def show_verify(report: Report) -> None:
    """What is damaged, and how much is as it was written."""
    _draw_facts("Looked at", {k: v for k, v in report.items() if k != "damaged"})
    for damage in report["damaged"]:
        out.print(f"{escape(damage['path'])}: {damage['why']}", soft_wrap=True)
    if report["damaged"]:
        out.print(f"{len(report['damaged'])} files are damaged: run `replay-pipeline repair`.")
    else:
        out.print("Nothing is damaged.")


def show_repair(report: Report) -> None:
    """What was made again, and what could not be."""
    for path in report["repaired"]:
        out.print(f"{escape(path)}: as it was written", soft_wrap=True)
    for path, why in report["left"].items():
        out.print(f"{escape(path)}: [bold red]left as it is[/], {escape(why)}", soft_wrap=True)
    if not report["repaired"] and not report["left"]:
        out.print("Nothing is damaged.")


def show_train(report: Report) -> None:
    """Show what the training came to, without its curves."""
    _draw_facts("Trained", {k: v for k, v in report.items() if not isinstance(v, dict)})
    for name, words in _EXPLAINED.items():
        if n := report.get(name):
            out.print(words.format(n=n), soft_wrap=True)


_KINDS: dict[str | None, str] = {
    None: "real teachers",
    "sample": "the sample's recorded teachers",
    "rehearsal": "a rehearsal, which is play",
}


def show_status(report: Report) -> None:
    """What is done, and what it cost."""
    if not report["batches"]:
        out.print("No sessions yet: run `replay-pipeline ingest` first.")
        return
    from replay_pipeline.stages import chain

    names = [stage.name for stage in chain.by_batch() if stage.told]
    if report.get("rehearsed"):
        names.insert(names.index("replay") + 1, "rehearsal")
    _draw_batches("Batches", tuple(names), report["batches"])
    if rehearsed := report.get("rehearsed"):
        out.print(f"Play in {escape(_words(rehearsed))}: {_PLAY}.", soft_wrap=True)
    ledger = report["ledger"]
    plain = {key: value for key, value in ledger.items() if not isinstance(value, list | tuple)}
    _table(f"Money of {_KINDS[report['played']]}", list(plain.items()))
    for choice, usd in report["other_ledgers_usd"].items():
        kind = _KINDS[None if choice == "openrouter" else choice]
        out.print(
            f"A second ledger holds ${usd:.4f} of {kind}: look at it with "
            f"REPLAY_TEACHERS={choice}.",
            soft_wrap=True,
        )
    if "open" in report:
        out.print(f"Left to ask: {escape(open_words(report['open']))}", soft_wrap=True)
    for batch, clients in list(report.get("fidelity", {}).items())[-_MAX_ROWS:]:
        shares = {name: row["share_within_10_percent"] for name, row in (clients or {}).items()}
        out.print(f"Fidelity of {escape(batch)}: {escape(_words(shares))}", soft_wrap=True)
    if dataset := report.get("dataset"):
        from replay_pipeline.publish import in_words

        out.print(in_words(dataset.get("blind")), soft_wrap=True)
    if scopes := ledger.get("scopes"):
        rows = {
            scope.pop("scope").replace("partition:", "batch:"): {
                key.removesuffix("_usd"): value for key, value in scope.items()
            }
            # Many tables end before all runs and batches are told; what they share is always told.
            for scope in sorted(map(dict, scopes), key=_is_shared)
        }
        names = tuple(next(iter(rows.values())))
        _draw_batches("Limits, in US dollars", names, rows, first="counts for")


def _is_shared(scope: Report) -> bool:
    return not scope["scope"].startswith(("run:", "partition:"))


def show_stale(report: Report) -> None:
    """What older code or other settings made, why it is stale, and what doing it again costs."""
    from replay_pipeline.stages import chain

    if not report["batches"]:
        out.print("Nothing is stale: code and settings would make the same of everything.")
        return
    found = {stage for row in report["batches"].values() for stage in row}
    stages = tuple(stage.name for stage in chain.STAGES if stage.name in found)
    rows = {key: {s: row.get(s, "") for s in stages} for key, row in report["batches"].items()}
    _draw_batches("Stale, and why", stages, rows)
    if cost := report["cost"]:
        n_calls = sum(row["n_calls"] for row in cost["teachers"])
        price = f"{n_calls:,} new questions for about ${cost['expected_usd']:.4f}"
    else:
        price = "no question changes, so it costs nothing"
    out.print(f"`replay-pipeline run` does it again: {price}. Paid answers are kept.")


def show_ranked(report: Report) -> None:
    """One row per pair: why it is worth a look, and what its sides are."""
    table = Table(
        "open", "right", "pair", "margin", "doubts", "rejected → chosen",
        title="Pairs to look at first", title_justify="left", title_style="bold",
    )  # fmt: skip
    for pair in report["pairs"]:
        sides = f"{pair['rejected'][:60]} → {pair['chosen'][:60]}"
        doubts = "; ".join(pair["doubts"]) or "none"
        p_better = "" if pair["p_better"] is None else f"{pair['p_better']:.2f}"
        cells = (
            f"{pair['score']:.2f}",
            p_better,
            pair["pair_id"],
            str(pair["margin"]),
            doubts,
            sides,
        )
        table.add_row(*map(escape, cells))
    out.print(table)


def show_findings(report: Report) -> None:
    """One line per check."""
    for finding in report["findings"]:
        mark = "[green]ok[/]" if finding["ok"] else "[red]no[/]"
        out.print(f"{mark}  {escape(finding['what'])}: {escape(finding['detail'])}")


def show_teachers(report: Report) -> None:
    """One row per teacher, and each problem once below them."""
    table = Table(
        "teacher", "model", "$ per M in / out", "may train", "state",
        title="Teachers", title_justify="left", title_style="bold",
    )  # fmt: skip
    problems: dict[str, list[str]] = {}
    for row in report["teachers"]:
        prices = (row["prompt_usd_per_mtok"], row["completion_usd_per_mtok"])
        table.add_row(
            escape(row["teacher"]),
            escape(row["model"]),
            "unknown" if None in prices else f"{prices[0]:.3g} / {prices[1]:.3g}",
            {True: "yes", False: "no", None: "not known"}[row["is_distillable"]],
            "no" if row["problem"] else "ok",
        )
        if row["problem"]:
            problems.setdefault(row["problem"], []).append(row["teacher"])
    out.print(table)
    for problem, names in problems.items():
        out.print(f"{escape(', '.join(names))}: {escape(problem)}", soft_wrap=True)


def show_lost_calls(report: Report) -> None:
    """One line per call whose outcome is not known."""
    for row in report["lost_calls"]:
        cost = "" if row["cost_usd"] is None else f", cost ${row['cost_usd']:.6f}"
        out.print(
            f"{row['sent_at']}  {row['teacher']}  {row['state_id']}: {row['why']}; "
            f"${row['reserved_usd']:.6f} reserved{cost}; {row['what']}",
            markup=False, soft_wrap=True,
        )  # fmt: skip
    if not report["lost_calls"]:
        out.print("No call is lost.")
