"""Dagster on one data root: its home, its records, and the command that serves them."""

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg

from replay_pipeline.assets.dead_runs import reconcile
from replay_pipeline.errors import ConfigError, MissingDependencyError, StorageError
from replay_pipeline.settings import DAGSTER_DATABASE, Settings, has_dagster_database
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.stages.views.page import page_of
from replay_pipeline.storage.outages import translated
from replay_pipeline.storage.permissions import make_private_folder
from replay_pipeline.storage.processes import python, start_environment
from replay_pipeline.storage.store import written_whole

_HEADER = "# Written by replay-pipeline each time it starts; delete this line to keep your changes."

_POSTGRES_YAML = f"storage: {{postgres: {{postgres_url: {{env: {DAGSTER_DATABASE}}}}}}}\n"

# Modules are looked for in the working directory first: left out, it would be the current folder.
_WORKSPACE_YAML = """\
load_from:
  - python_module:
      module_name: replay_pipeline.assets.definitions
      location_name: replay_pipeline
      working_directory: {home}
"""


_STORES = ("AWS_*", "AZURE_*", "FSSPEC_*", "GCS_*", "GOOGLE_*")
"""Where the clients of object stores look for credentials, endpoint and region."""

_EVENT_BATCH = "500"
"""Events of one step that Dagster hands to PostgreSQL together."""


def prepare_home(local_dir: Path) -> Path:
    """Create `.dagster` below a local folder, with settings unless it already has some.

    Returns the created folder.

    Raises:
        ConfigError: you asked for PostgreSQL, but its URL names no supported driver, or the
            existing settings don't use it.
        MissingDependencyError: you asked for PostgreSQL, but its driver isn't installed.
        StorageError: the folder cannot be written.
    """
    home = local_dir.absolute() / ".dagster"
    with translated(home, "made"):
        make_private_folder(home)
    if has_dagster_database() and importlib.util.find_spec("dagster_postgres") is None:
        raise MissingDependencyError(
            f"{DAGSTER_DATABASE} needs dagster-postgres: pip install 'replay-pipeline[postgres]'"
        )
    storage = _POSTGRES_YAML if has_dagster_database() else ""  # SQLite files in this folder
    instance_yaml = Path(__file__).with_name("dagster.yaml").read_text("utf-8") + storage
    workspace_yaml = _WORKSPACE_YAML.format(home=json.dumps(str(home)))
    for name, text in (("dagster.yaml", instance_yaml), ("workspace.yaml", workspace_yaml)):
        path, whole = home / name, f"{_HEADER}\n{text}".encode()
        found = path.read_bytes() if path.exists() else _HEADER.encode()
        if found.startswith(_HEADER.encode()) and found != whole:
            with written_whole(path) as file:
                file.write(whole)
    written = (home / "dagster.yaml").read_text("utf-8")
    if has_dagster_database() and DAGSTER_DATABASE not in written:
        raise ConfigError(
            f"{home / 'dagster.yaml'} was changed and does not use {DAGSTER_DATABASE}: put "
            f"`storage: {{postgres: {{postgres_url: {{env: {DAGSTER_DATABASE}}}}}}}` there, or unset it"
        )
    return home


@contextmanager
def open_instance(
    pipeline: Pipeline, *, runs_are_here: bool = False
) -> Iterator[dg.DagsterInstance]:
    """Yield Dagster's records of a data root, after cleaning up after a crash.

    Args:
        pipeline: the pipeline on the data root.
        runs_are_here: whether every run is a process of this machine. With records in files, this
            is assumed. With records on a server, a run that isn't found here may be alive on
            another machine, so it isn't touched.

    Raises:
        ConfigError: the settings name no home for Dagster on this machine.
        StorageError: Dagster's home can't be written, or its database can't be reached.
    """
    home = prepare_home(pipeline.settings.local_dir())
    with _opened(home) as instance:
        reconcile(instance, runs_are_here=runs_are_here)
        yield instance


def _opened(home: Path) -> dg.DagsterInstance:
    if not has_dagster_database():
        return dg.DagsterInstance.from_config(str(home))
    failures = (
        importlib.import_module("sqlalchemy.exc").SQLAlchemyError,
        importlib.import_module("dagster_postgres.utils").DagsterPostgresException,
    )
    try:
        return dg.DagsterInstance.from_config(str(home))
    except failures as error:
        # The words of a driver may hold the address, and with it the password.
        raise StorageError(
            f"the database that {DAGSTER_DATABASE} names cannot be opened "
            f"({type(error).__name__}); it should be postgresql+psycopg2://user:password@host:5432/name"
        ) from None


def ui_command(settings: Settings, *, port: int) -> tuple[list[str], dict[str, str]]:
    """Return the command that serves Dagster on the data root, and its environment.

    When the command is told to stop, it stops every run and waits for their ends.
    """
    local_dir = settings.local_dir().absolute()
    home = prepare_home(local_dir)
    words = (str(home / "workspace.yaml"), str(port), str(page_of(settings).parent))
    serve = python("replay_pipeline.assets.serve", *words)
    environment = start_environment(
        also=_variables(settings),
        DAGSTER_IS_DEV_CLI="1",
        DAGSTER_HOME=str(home),
        DAGSTER_EVENT_BATCH_SIZE=_EVENT_BATCH,
        REPLAY_DATA=str(settings.data_dir.absolute()),
        REPLAY_HOME=str(local_dir),
    )
    if places := environment.get("PYTHONPATH"):
        # To load our code, Dagster drops the first place of modules, which it takes for the script's.
        environment["PYTHONPATH"] = os.pathsep.join([sys.prefix, places])
    return python("replay_pipeline.assets.supervise", *serve), environment


def _variables(settings: Settings) -> list[str]:
    """Return variables that runs on these settings need: their keys, and those of the stores they use."""
    teachers = [*settings.replay.teachers, *filter(None, [settings.replay.student])]
    keys = {"HF_TOKEN", *(each.api_key_env for each in teachers if each.api_key_env)}
    places = (settings.data_dir, settings.dataset_dir())
    return [
        "REPLAY_*",
        "CLAUDE_CONFIG_DIR",
        *(f"{key}{end}" for key in sorted(keys) for end in ("", "_FILE")),
        *settings.train.environment,
        *(() if all(isinstance(place, Path) for place in places) else _STORES),
    ]
