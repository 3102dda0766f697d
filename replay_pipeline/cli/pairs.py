"""The commands that extract pairs and show them."""

from pathlib import Path
from typing import Annotated, Any

import typer

from replay_pipeline.cli.app import pairs_app
from replay_pipeline.cli.console import (
    escape,
    out,
    print_report,
    show_pairs,
    show_ranked,
)
from replay_pipeline.cli.options import BatchOption, DataOption, JsonOption, SettingsOption
from replay_pipeline.cli.shared import chosen, open_pipeline, ranked_row


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
        Path | None, typer.Option(help="Marks exported from the page of `look`.", metavar="FILE")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Report the states where the teachers agree on an action that the agent did not take."""
    if context.invoked_subcommand is not None:
        return
    changes: dict[str, Any] = {"pairs": {}}
    if threshold is not None:
        changes["pairs"]["agreement_threshold"] = threshold
    if marks is not None:
        changes["pairs"]["marks"] = marks
    work = open_pipeline(settings, data, changes=changes)
    reports = {key: work.pairs(key).report for key in chosen(work, batch)}
    print_report(reports, as_json=as_json, show=show_pairs)


@pairs_app.command("show")
def pairs_show(
    state: Annotated[str, typer.Argument(help="Id of the state, or its first characters.")],
    data: DataOption = None,
    settings: SettingsOption = None,
) -> None:
    """Show one state: the messages before it, the agent's action, and each teacher's action."""
    text = open_pipeline(settings, data).show(state)
    out.print(escape(text), highlight=False, soft_wrap=True)


@pairs_app.command("rank")
def pairs_rank(
    data: DataOption = None,
    settings: SettingsOption = None,
    top: Annotated[int, typer.Option(min=1, help="How many to show.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List the pairs in the order of review: the least certain first."""
    shown = [ranked_row(pair) for pair in open_pipeline(settings, data).ranked_pairs()[:top]]
    print_report({"pairs": shown}, as_json=as_json, show=show_ranked)
