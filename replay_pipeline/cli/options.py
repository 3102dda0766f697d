"""Options that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

from replay_pipeline.storage.store import as_path

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
TeachersOption = Annotated[
    str | None,
    typer.Option(
        "--teachers",
        help="The teachers to ask: `openrouter`, `frontier`, `sample` (recorded answers for the sample), "
        "or `rehearsal` (made-up answers for your own sessions, without a key). By default "
        "`REPLAY_TEACHERS`, else the settings.",
        metavar="WHO",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
BatchOption = Annotated[
    list[str] | None,
    typer.Option("--batch", help="Only this trace batch; can be repeated.", metavar="KEY"),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before paying.")]
BudgetOption = Annotated[
    float | None,
    typer.Option("--budget", help="Hard ceiling for this run, in US dollars.", metavar="USD"),
]
