"""`replay-pipeline`: every stage as one command, without Dagster."""

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.logging import RichHandler

from replay_pipeline.console import (
    PrintableFormatter,
    err,
    escape,
    out,
    print_report,
    progress_bars,
    show_control,
    show_estimate,
    show_findings,
    show_ingest,
    show_normalize,
    show_pairs,
    show_publish,
    show_replay,
    show_status,
    show_summary,
    show_teachers,
    show_train,
)
from replay_pipeline.errors import ConfigError, ReplayPipelineError
from replay_pipeline.settings import Settings, redaction_salt
from replay_pipeline.storage.store import as_path

app = typer.Typer(
    name="replay-pipeline",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Turn Claude Code sessions into a preference dataset, and train on it.\n\n"
    "Sessions → states → teacher answers → pairs → normalized pairs → dataset → model. "
    "`run` does all of it; each other command does one step of it.",
)
teachers_app = typer.Typer(no_args_is_help=True, help="Look at the teachers, or serve local ones.")
pairs_app = typer.Typer(invoke_without_command=True, help="Extract pairs, and look at them.")
app.add_typer(teachers_app, name="teachers")
app.add_typer(pairs_app, name="pairs")

DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data",
        help="Data root: a folder, or a URL such as `s3://bucket/root`. By default `REPLAY_DATA`, "
        "else `data`.",
        metavar="DIR",
        parser=as_path,
    ),
]
SettingsOption = Annotated[
    Path | None,
    typer.Option(
        "--settings",
        help="TOML settings. By default `REPLAY_SETTINGS`, else `settings.toml` in the data root.",
        metavar="FILE",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
BatchOption = Annotated[
    list[str] | None,
    typer.Option("--batch", help="Only this trace batch; may be given again.", metavar="KEY"),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before paying.")]
_NOTHING_MORE_USD = 1e-9
"""A ceiling that buys no answer: what is in the ledger already is taken from there."""

BudgetOption = Annotated[
    float | None,
    typer.Option("--budget", help="Hard ceiling for this run, in US dollars.", metavar="USD"),
]


def main() -> None:
    """Run the command line; a user's mistake ends with one line and a code, never a trace."""
    try:
        app(standalone_mode=True)
    except ReplayPipelineError as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        err.print("stopped; what was paid for is kept, and the same command goes on from here")
        sys.exit(130)


@app.callback()
def _every_command(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens.")] = False,
) -> None:
    handler = RichHandler(console=err, show_path=False)
    handler.setFormatter(PrintableFormatter("%(message)s"))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])


# The whole


@app.command()
def run(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="Session files or folders. By default Claude Code's own folder."),
    ] = None,
    data: DataOption = None,
    settings: SettingsOption = None,
    budget: BudgetOption = None,
    train: Annotated[bool, typer.Option(help="Train on the dataset at the end.")] = True,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Take all sessions through every stage: new work only, nothing is paid twice."""
    from replay_pipeline.stages import pipeline

    loaded = _load(settings, data, budget=budget, sources=paths)
    with progress_bars() as on_progress:
        work = pipeline.Pipeline(loaded, on_progress=on_progress)
        before = work.receipts.stamps()
        work.ingest_new()
    _confirm(work, yes=yes)
    with progress_bars() as on_progress:
        summary = pipeline.run(loaded, with_training=train, since=before, on_progress=on_progress)
    print_report(summary, as_json=as_json, show=show_summary)


@app.command()
def demo(
    data: Annotated[
        Path, typer.Option("--data", help="Folder of the demo.", parser=as_path, metavar="DIR")
    ] = Path("demo"),
    yes: YesOption = False,
) -> None:
    """Run the whole product on the bundled sample, under Dagster.

    Needs no key, no GPU and no network: the teachers are a local server with recorded answers.
    With `OPENROUTER_API_KEY` and `REPLAY_TEACHERS=openrouter` the same command asks real ones,
    after showing what it would cost.
    """
    from replay_pipeline.assets.in_process import run_jobs
    from replay_pipeline.stages import pipeline
    from replay_pipeline.storage.tables import written_whole

    _prepare_demo(data)
    loaded = _load(data / "settings.toml", data)
    with progress_bars() as on_progress:
        work = pipeline.Pipeline(loaded, on_progress=on_progress)
        before = work.receipts.stamps()
        work.ingest_new()
    if not loaded.replay.sample_teachers:
        _confirm(work, yes=yes)
    with progress_bars() as on_progress:
        run_jobs(work, settings_path=data / "settings.toml", on_progress=on_progress)
    summary = work.summary(since=before)
    with written_whole(data / "report.json") as file:
        file.write(json.dumps(summary, indent=1).encode())
    show_summary(summary)
    out.print(f"Everything is in [bold]{data}[/]; the figures are in {data / 'report.json'}.")
    out.print("Look at it in Dagster: [bold]make ui[/], then open http://127.0.0.1:3000")


# One stage each


@app.command()
def ingest(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="Session files or folders. By default Claude Code's own folder."),
    ] = None,
    out_dir: Annotated[
        Path | None,
        typer.Option("--out", help="Write plain tables here, outside any data root."),
    ] = None,
    data: DataOption = None,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sessions to states. Into the data root as batches, or with `--out` to one folder."""
    from replay_pipeline import ingesters
    from replay_pipeline.stages import pipeline
    from replay_pipeline.stages.summary import summarize

    loaded = _load(settings, data, sources=paths)
    with progress_bars() as on_progress:
        if out_dir is not None:
            if not paths:
                raise ConfigError("--out needs the sessions to read: name files or folders")
            result = ingesters.ingest(
                paths,
                redact=loaded.ingest.is_redacted,
                hash_project=loaded.ingest.is_project_hashed,
                salt=redaction_salt(),
                on_progress=on_progress,
            )
            ingesters.write_traces(result, out_dir)
            report = result.report.to_json()
        else:
            work = pipeline.Pipeline(loaded, on_progress=on_progress)
            before = work.receipts.stamps()
            work.ingest_new()
            report = summarize(work.receipts.all(since=before))
    print_report(report, as_json=as_json, show=show_ingest)


@app.command()
def estimate(
    data: DataOption = None,
    settings: SettingsOption = None,
    batch: BatchOption = None,
    as_json: JsonOption = False,
) -> None:
    """What the replay would cost at today's prices, before anything is paid."""
    from replay_pipeline.stages import pipeline

    work = pipeline.Pipeline(_load(settings, data))
    print_report(work.estimate(_chosen(work, batch)).to_json(), as_json=as_json, show=show_estimate)


@app.command()
def replay(
    data: DataOption = None,
    settings: SettingsOption = None,
    batch: BatchOption = None,
    budget: BudgetOption = None,
    half_price: Annotated[
        bool,
        typer.Option(
            "--half-price",
            help="Hand all questions in by the batch API: half the price, answers within a day. "
            "Ctrl-C ends the waiting; the same command takes the answers over.",
        ),
    ] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Ask the teachers, under a hard ceiling. Answers that are paid for are never asked again."""
    from replay_pipeline.stages import pipeline

    loaded = _load(settings, data, budget=budget)
    work = pipeline.Pipeline(loaded)
    batches = _chosen(work, batch)
    _confirm(work, yes=yes, batches=batches)
    max_usd = None
    if half_price:
        err.print(
            "handing the questions in; answers may take up to a day (Ctrl-C ends the waiting)"
        )
        by_batch = work.hand_in(batches)
        err.print(f"{by_batch.n_sent} asked by batch for ${by_batch.newly_spent_usd:.4f}")
        max_usd = _NOTHING_MORE_USD
    with progress_bars() as on_progress:
        replay_one = pipeline.Pipeline(loaded, on_progress=on_progress).replay_within(max_usd)
        reports = {key: replay_one(key).report for key in batches}
    print_report(reports, as_json=as_json, show=show_replay)


@app.command()
def control(
    data: DataOption = None,
    settings: SettingsOption = None,
    budget: Annotated[
        float, typer.Option("--budget", min=0, help="Hard ceiling in US dollars.", metavar="USD")
    ] = 1.0,
    states: Annotated[int, typer.Option(min=1, help="Size of the sample.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """Ask the students' own models again: how often do they leave their recorded action?

    The higher the share, the less a teacher's disagreement says. The figure goes into the card.
    """
    from replay_pipeline.stages import pipeline

    with progress_bars() as on_progress:
        work = pipeline.Pipeline(_load(settings, data), on_progress=on_progress)
        _chosen(work, None)
        report = work.control(max_usd=budget, n_states=states).report
    print_report(report, as_json=as_json, show=show_control)


@pairs_app.callback()
def pairs(
    context: typer.Context,
    data: DataOption = None,
    settings: SettingsOption = None,
    batch: BatchOption = None,
    threshold: Annotated[
        int | None, typer.Option(help="Votes of distinct model families that make a consensus.")
    ] = None,
    marks: Annotated[
        Path | None, typer.Option(help="Marks exported from the review page.", metavar="FILE")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Where the teachers agree on something that the student did not do."""
    if context.invoked_subcommand is not None:
        return
    from replay_pipeline.stages import pipeline

    changes: dict[str, Any] = {"pairs": {}}
    if threshold is not None:
        changes["pairs"]["agreement_threshold"] = threshold
    if marks is not None:
        changes["pairs"]["marks"] = marks
    work = pipeline.Pipeline(_load(settings, data, changes=changes))
    reports = {key: work.pairs(key).report for key in _chosen(work, batch)}
    print_report(reports, as_json=as_json, show=show_pairs)


@pairs_app.command("show")
def pairs_show(
    state: Annotated[str, typer.Argument(help="Id of the state, or its first characters.")],
    data: DataOption = None,
    settings: SettingsOption = None,
) -> None:
    """One state: what came before, what the student did, and what each teacher would do."""
    from replay_pipeline.stages import pipeline

    text = pipeline.Pipeline(_load(settings, data)).show(state)
    out.print(escape(text), highlight=False, soft_wrap=True)


@app.command()
def review(
    data: DataOption = None,
    settings: SettingsOption = None,
    to: Annotated[Path | None, typer.Option("--to", help="The HTML file to write.")] = None,
) -> None:
    """Write a page that shows all pairs side by side; it needs no server."""
    from replay_pipeline.stages import pipeline

    work = pipeline.Pipeline(_load(settings, data))
    path = work.review(to)
    out.print(f"Open [bold]{escape(str(path))}[/] in a browser.")


@app.command()
def normalize(
    data: DataOption = None,
    settings: SettingsOption = None,
    batch: BatchOption = None,
    recipe: Annotated[
        str | None, typer.Option(help="`default`, `tool_calls`, `strict`, `lint` or a YAML file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Keep the pairs that are fit to publish; keep the others apart, each with its reason."""
    from replay_pipeline.stages import pipeline

    changes = {} if recipe is None else {"normalize": {"recipe": recipe}}
    work = pipeline.Pipeline(_load(settings, data, changes=changes))
    reports = {key: work.normalize(key).report for key in _chosen(work, batch)}
    print_report(reports, as_json=as_json, show=show_normalize)


@app.command()
def publish(
    data: DataOption = None,
    settings: SettingsOption = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", help="Dataset folder or URL.", parser=as_path, metavar="DIR"),
    ] = None,
    repo: Annotated[
        str | None, typer.Option(help="Hub dataset `owner/name`; needs `HF_TOKEN`.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the dataset folder, and push it to the Hub if a repository is named."""
    from replay_pipeline.stages import pipeline

    changes: dict[str, Any] = {"publish": {}}
    if to is not None:
        changes["publish"]["folder"] = to
    if repo is not None:
        changes["publish"]["repo_id"] = repo
    with progress_bars() as on_progress:
        work = pipeline.Pipeline(_load(settings, data, changes=changes), on_progress=on_progress)
        report = work.publish().report
    print_report(report, as_json=as_json, show=show_publish)


@app.command()
def retract(
    session: Annotated[
        list[str] | None,
        typer.Option("--session", help="Id of a session; may be given again.", metavar="ID"),
    ] = None,
    batch: Annotated[
        list[str] | None,
        typer.Option("--batch", help="A whole trace batch; may be given again.", metavar="KEY"),
    ] = None,
    data: DataOption = None,
    settings: SettingsOption = None,
    repo: Annotated[
        str | None, typer.Option(help="Hub dataset `owner/name` to take them out of as well.")
    ] = None,
    erase: Annotated[
        bool, typer.Option(help="Forget the history of the Hub dataset too. Can't be undone.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Take sessions or batches out of the dataset, for good: they are never published again.

    What is on this machine stays: the pipeline's own tables, and the sessions themselves.
    """
    from replay_pipeline.stages import pipeline

    changes = {} if repo is None else {"publish": {"repo_id": repo}}
    work = pipeline.Pipeline(_load(settings, data, changes=changes))
    named = f"{len(session or ())} sessions and {len(batch or ())} batches"
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"retracting {named} can't be undone: give --yes")
        if not typer.confirm(f"Take {named} out of {work.settings.dataset_dir()} for good?"):
            raise ConfigError("stopped; nothing was changed")
    report = work.retract(session_ids=session or (), batches=batch or (), erase=erase)
    print_report(report.to_json(), as_json=as_json, show=show_publish)


@app.command()
def train(
    data: DataOption = None,
    settings: SettingsOption = None,
    config: Annotated[Path | None, typer.Option(help="The trainer's YAML file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train on the published dataset with all three channels."""
    from replay_pipeline.stages import pipeline

    changes = {} if config is None else {"train": {"config": config}}
    with progress_bars() as on_progress:
        work = pipeline.Pipeline(_load(settings, data, changes=changes), on_progress=on_progress)
        report = work.train().report
    print_report(report, as_json=as_json, show=show_train)


# Around it


@app.command()
def status(
    data: DataOption = None, settings: SettingsOption = None, as_json: JsonOption = False
) -> None:
    """What is done, what it cost, and what is still open."""
    from replay_pipeline.stages import pipeline

    print_report(
        pipeline.Pipeline(_load(settings, data)).status(), as_json=as_json, show=show_status
    )


@app.command()
def doctor(
    data: DataOption = None, settings: SettingsOption = None, as_json: JsonOption = False
) -> None:
    """Check this machine and these settings: packages, keys, teachers, disk, folders."""
    from replay_pipeline.stages import pipeline

    findings = pipeline.Pipeline(_load(settings, data)).examine()
    print_report({"findings": findings}, as_json=as_json, show=show_findings)
    if any(not finding["ok"] for finding in findings):
        raise typer.Exit(1)


@app.command()
def ui(
    data: DataOption = None,
    port: Annotated[int, typer.Option(min=1, max=65535)] = 3000,
    sample: Annotated[
        bool, typer.Option("--demo", help="Set the data root up as `demo` does.")
    ] = False,
) -> None:
    """Open Dagster on the data root; it listens on this machine only."""
    from replay_pipeline.assets.records import sync
    from replay_pipeline.orchestration.instance import ui_command
    from replay_pipeline.stages import pipeline

    if sample:
        data = data or Path("demo")
        if not (data / "settings.toml").exists():
            _prepare_demo(data)
    work = pipeline.Pipeline(_load(None, data))
    sync(work)
    command, environment = ui_command(work.settings, port=port)
    out.print(f"Dagster on [bold]{work.root.path}[/]: http://127.0.0.1:{port} (Ctrl-C stops it)")
    # A shell starts background jobs deaf to SIGINT, and Dagster would then not hear SIGTERM either.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.execve(command[0], command, environment)


@app.command()
def sync(
    data: DataOption = None,
    settings: SettingsOption = None,
    runs_are_here: Annotated[
        bool,
        typer.Option(
            "--runs-are-here",
            help="Every run is a process of this machine: end those whose process is gone, also "
            "where Dagster's records are on a server.",
        ),
    ] = False,
) -> None:
    """Bring Dagster's view up to date with the files, or back after its home was lost."""
    from replay_pipeline.assets import records
    from replay_pipeline.stages import pipeline

    work = pipeline.Pipeline(_load(settings, data))
    n_added = records.sync(work, runs_are_here=runs_are_here)
    out.print(f"{n_added} materializations added")


@teachers_app.command("list")
def teachers_list(
    data: DataOption = None, settings: SettingsOption = None, as_json: JsonOption = False
) -> None:
    """The teachers of these settings: model, key, price, terms."""
    from replay_pipeline.stages import pipeline

    checks = pipeline.Pipeline(_load(settings, data)).check_teachers()
    print_report({"teachers": checks}, as_json=as_json, show=show_teachers)


@teachers_app.command("serve")
def teachers_serve(
    answers: Annotated[
        Path | None, typer.Option(help="Recorded answers (JSON lines). By default the sample's.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8400,
) -> None:
    """Serve recorded answers on this machine, in OpenRouter's protocol."""
    from replay_pipeline.sample import ANSWERS_FILE
    from replay_pipeline.testing import script_of, serve

    serve(
        script_of(answers or ANSWERS_FILE),
        port=port,
        on_ready=lambda url: out.print(f"Teachers at {url} (Ctrl-C stops them)"),
    )


# What the commands share


def _load(
    settings: Path | None,
    data: Path | None,
    *,
    budget: float | None = None,
    sources: list[Path] | None = None,
    changes: dict[str, Any] | None = None,
) -> Settings:
    changes = dict(changes or {})
    if budget is not None:
        changes["replay"] = {"max_total_usd": budget}
    if sources:
        changes["ingest"] = {"sources": sources}
    return Settings.load(settings, data_dir=data, changes=changes)


_DEMO_HEADER = "# Written by `replay-pipeline demo`."


def _prepare_demo(data: Path) -> None:
    """Write the settings of the demo, which the UI reads as well."""
    from replay_pipeline.sample import SESSIONS_DIR
    from replay_pipeline.settings import environment
    from replay_pipeline.storage.tables import written_whole

    path = data / "settings.toml"
    if path.exists() and not path.read_text("utf-8").startswith(_DEMO_HEADER):
        raise ConfigError(f"{path} is not the demo's: choose another folder with --data")
    is_real = environment("REPLAY_TEACHERS", "sample") != "sample"
    lines = [
        _DEMO_HEADER,
        "[ingest]",
        f"sources = [{json.dumps(str(SESSIONS_DIR))}]",
        "max_batch_sessions = 4",
        "[replay]",
        f"sample_teachers = {json.dumps(not is_real)}",
        "max_total_usd = 5.0",
        "confirm_above_usd = 0.0",
    ]
    with written_whole(path) as file:
        file.write(("\n".join(lines) + "\n").encode())


def _chosen(work: Any, batches: list[str] | None) -> list[str]:
    known = work.batches()
    if unknown := sorted(set(batches or ()) - set(known)):
        raise ConfigError(
            f"no trace batch {', '.join(unknown)}; there are: {', '.join(known) or 'none yet'}"
        )
    if not known:
        raise ConfigError(f"{work.root.path}: no trace batches; run `replay-pipeline ingest` first")
    return [key for key in known if not batches or key in batches]


def _confirm(work: Any, *, yes: bool, batches: list[str] | None = None) -> None:
    """Show the estimate of a run that costs more than the threshold, and ask."""
    work.check_keys()
    if yes or work.settings.replay.sample_teachers:
        return
    estimate = work.estimate(batches).to_json()
    if estimate["expected_usd"] <= work.settings.replay.confirm_above_usd:
        return
    show_estimate(estimate)
    if not sys.stdin.isatty():
        raise ConfigError(
            f"this run is expected to cost {estimate['expected_usd']:.2f} USD, more than "
            f"{work.settings.replay.confirm_above_usd:.2f}: give --yes, or raise "
            "`replay.confirm_above_usd`"
        )
    if not typer.confirm("Go on?"):
        raise ConfigError("stopped; nothing was paid")
