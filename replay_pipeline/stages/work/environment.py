"""Serve states as an environment that OpenEnv's clients speak to."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from replay_pipeline.errors import ConfigError
from replay_pipeline.publish.loading import rows_of
from replay_pipeline.settings import WorkspaceSettings
from replay_pipeline.stages.work.trials import sandbox_of
from replay_pipeline.stages.work.workspaces import Workspaces
from replay_pipeline.workspaces.environment import CheckedTask, RecordedTask
from replay_pipeline.workspaces.sandbox import Ran
from replay_pipeline.workspaces.serve import serve


def serve_checked(
    workspaces: Workspaces,
    options: WorkspaceSettings,
    *,
    host: str,
    port: int,
    limit: int,
    max_calls: int,
    on_ready: Callable[[str], None],
) -> None:
    """Serve states whose project has a check, until the process is stopped.

    Raises:
        ConfigError: commands may not run, no project has a check, or no state of one was found.
    """
    if options.execute != "commands":
        raise ConfigError(
            'an environment runs commands in a sandbox: set `workspaces.execute = "commands"`'
        )
    if not options.checks:
        raise ConfigError(
            "no project has a check: set `workspaces.checks`, a command by working tree"
        )
    sandbox = sandbox_of(options)

    def run(task: CheckedTask, command: str, files: Mapping[str, bytes]) -> Ran:
        plain = {name: data for name, data in files.items() if name[:5] != ".git/"}
        return sandbox.run(command, root=task.root, files=plain, cwd=task.cwd)

    tasks = workspaces.tasks(options.checks, run=run, limit=limit, max_calls=max_calls)
    if not tasks:
        raise ConfigError(
            f"no session worked in {', '.join(options.checks)}: name the sessions and the repository of that project"
        )
    serve({task.state_id: task for task in tasks}, host=host, port=port, on_ready=on_ready)


def serve_recorded(dataset: str, *, host: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve the states of a published dataset whose consensus is a tool call, until stopped.

    Raises:
        ConfigError: the dataset can't be read, has no such state, or the address can't be used.
        MissingDependencyError: `datasets` isn't installed.
    """
    tasks: dict[str, RecordedTask] = {}
    for number, row in enumerate(map(_known, rows_of(dataset, "prompts"))):
        if row["consensus"].get("tool_calls") and row.get("tools"):
            name = str(row.get("state_id") or number)
            tasks[name] = RecordedTask({**row, "state_id": name}, row["tools"])
    if not tasks:
        raise ConfigError(f"{dataset}: has no 'prompts' with tools and a tool call as consensus")
    serve(tasks, host=host, port=port, on_ready=on_ready)


def _known(value: Any) -> Any:
    """Return a row without the parts that are null, and with its tools decoded."""
    if isinstance(value, dict):
        known = {key: _known(each) for key, each in value.items() if each is not None}
        tools = known.get("tools")
        return known | ({"tools": json.loads(tools)} if isinstance(tools, str) else {})
    return [_known(each) for each in value] if isinstance(value, list) else value
