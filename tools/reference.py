"""Reference pages that are made from the code: `make docs` writes them, a test compares them."""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel

from replay_pipeline.cli import app
from replay_pipeline.settings import Settings
from replay_pipeline.storage.schemas import ABOUT, TABLES, describe
from replay_pipeline.types import TeacherSpec

_SETTINGS_HEAD = """\
# Settings

One TOML file says everything; without it the defaults hold. It is the file after `--settings`, else
the one that `REPLAY_SETTINGS` names, else `settings.toml` in the data root.

| variable | meaning |
|---|---|
| `REPLAY_DATA` | the data root, as `--data`: a folder, `s3://bucket/root` or `gs://bucket/root` |
| `REPLAY_HOME` | folder for what must be on this machine, where the data root is a URL |
| `REPLAY_SETTINGS` | the settings file |
| `REPLAY_TEACHERS` | `sample` (recorded, local), `rehearsal` (made up, local), `openrouter` (the default teachers) or `frontier` |
| `REPLAY_CONFIG_DIR` | your own configuration folder, an absolute path: `trust.json` says there which hosts keys may be sent to and which settings files are used; by default that of the platform |
| `REPLAY_SALT` | makes placeholders of secrets unguessable outside this installation |
| `REPLAY_LEDGER` | the ledger, as `replay.ledger`: the place for a URL with a password |
| `REPLAY_DAGSTER_DB` | Dagster's records on PostgreSQL, as `postgresql+psycopg2://user:password@host/name`; without it they are files |
| `REPLAY_WEBHOOK` | the address that is told when a run fails, as `notify.webhook_url` |
| `REPLAY_DEBUG` | `1`: show the stack below an error, also in Dagster; `--debug` sets it |
| `OPENROUTER_API_KEY`, `HF_TOKEN` | keys; read from the environment only, never written |

```toml
data_dir = "data"

[ingest]
sources = ["/home/me/.claude/projects"]
window = "clear_tool_results:10"

[replay]
max_total_usd = 5.0
max_daily_usd = 20.0
gates = ["wide_first:0.1"]

[[replay.teachers]]
name = "local"
model = "qwen3-coder-30b"
base_url = "http://127.0.0.1:8000/v1"
api_key_env = ""
price = {prompt = 0.0, completion = 0.0}

[[replay.teachers]]
name = "deepseek"
model = "deepseek/deepseek-v4-pro"

[pairs]
agreement_threshold = 2
```

Teachers whose vendor forbids training on its answers need their model ids in
`replay.accepted_terms`; the dataset card says so.
"""


def settings_page() -> str:
    """Return the page `docs/settings.md`."""
    parts = [_SETTINGS_HEAD.rstrip()]
    parts += ["## At the top", "Before any section.", _fields(Settings)]
    for name, section in _sections(Settings):
        parts += [f"## [{name}]", section.__doc__ or "", _fields(section)]
    parts += ["## [[replay.teachers]]", TeacherSpec.__doc__ or "", _fields(TeacherSpec)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield prefix + name, section
            yield from _sections(section, f"{prefix}{name}.")


def _fields(model: type[BaseModel]) -> str:
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        if isinstance(field.default, BaseModel):
            continue
        meaning = " ".join((field.description or "").split())
        rows.append(
            f"| `{name}` | {_default(field.get_default(call_default_factory=True))} | {meaning} |"
        )
    return "\n".join(rows)


def _default(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], TeacherSpec):
        return ", ".join(f"`{teacher.model}`" for teacher in value)
    if repr(value) == "PydanticUndefined":
        return "needed"
    return "—" if value is None or value in ((), {}) else f"`{value}`"


def tables_page() -> str:
    """Return the page `docs/tables.md`."""
    parts = [
        "# Tables",
        "Every table lies under the data root as "
        "`<table>/trace_batch=<key>/part-0.parquet`: zstd, an explicit schema, and the key "
        "`schema_version` in the file's metadata. Equal rows give equal bytes.",
    ]
    for name, schema in TABLES.items():
        rows = [f"| `{f.name}` | {f.type} | {describe(name, f.name)} |" for f in schema]
        parts += [
            f"## {name}",
            ABOUT[name],
            "\n".join(["| column | type | meaning |", "|---|---|---|", *rows]),
        ]
    return "\n\n".join(parts) + "\n"


_CLI_HEAD = """\
# Command line

`replay-pipeline COMMAND --help` says the same in a terminal. `--data` and `--settings` come after the
command. A mistake of yours ends with one line and exit code 2, work that failed with 1, Ctrl-C with
130. `--debug`, anywhere in a command, shows the stack below an error. The ledger keeps every paid answer, and the same command goes on from there.
"""


def cli_page() -> str:
    """Return the page `docs/cli.md`."""
    parts = [_CLI_HEAD.strip()]
    for name, command in _commands(typer.main.get_command(app), "replay-pipeline"):
        usage = " ".join([name, *_usage(command)])
        parts += [f"## {name.removeprefix('replay-pipeline ')}", f"```text\n{usage}\n```"]
        parts += [inspect.cleandoc(command.help or ""), _parameters(command)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield every command by its whole name; a group only where it does something by itself."""
    children = getattr(command, "commands", {})
    if not children or getattr(command, "invoke_without_command", False):
        yield name, command
    for child, below in children.items():
        yield from _commands(below, f"{name} {child}")


def _usage(command: Any) -> Iterator[str]:
    if any(parameter.param_type_name == "option" for parameter in command.params):
        yield "[OPTIONS]"
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            shown = parameter.name.upper() + ("..." if parameter.nargs == -1 else "")
            yield shown if parameter.required else f"[{shown}]"


def _parameters(command: Any) -> str:
    rows = []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            names = f"`{parameter.name.upper()}`"
        else:
            names = ", ".join(f"`{n}`" for n in (*parameter.opts, *parameter.secondary_opts))
        default = parameter.default
        shown = "" if default in (None, False, ()) or callable(default) else f"`{default}`"
        meaning = " ".join((getattr(parameter, "help", "") or "").split())
        rows.append(f"| {names} | {shown} | {meaning} |")
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *rows]) if rows else ""


def write_pages(folder: Path) -> None:
    """Write every page that is made from the code into `folder`."""
    (folder / "cli.md").write_text(cli_page(), "utf-8")
    (folder / "tables.md").write_text(tables_page(), "utf-8")
    (folder / "settings.md").write_text(settings_page(), "utf-8")


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
