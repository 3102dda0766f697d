"""Serve states that have a check as an environment."""

from collections.abc import Callable, Mapping

from replay_pipeline.errors import ConfigError
from replay_pipeline.settings import WorkspaceSettings
from replay_pipeline.stages.trials import sandbox_of
from replay_pipeline.stages.workspaces import Workspaces
from replay_pipeline.workspaces.environment import CheckedTask, Run
from replay_pipeline.workspaces.sandbox import Ran
from replay_pipeline.workspaces.serve import Served, serve


def serve_tasks(
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
            "no project has a check: `replay-pipeline workspace checks` proposes some for the settings"
        )
    sandbox = sandbox_of(options)
    tasks = workspaces.tasks(options.checks, limit=limit)
    if not tasks:
        raise ConfigError(
            f"no session worked in {', '.join(options.checks)}: name the sessions and the repository of that project"
        )

    def run_of(task: CheckedTask) -> Run:
        def run(command: str, files: Mapping[str, bytes]) -> Ran:
            plain = {name: data for name, data in files.items() if name[:5] != ".git/"}
            return sandbox.run(command, root=task.root, files=plain, cwd=task.cwd)

        return run

    serve(Served(tasks, run_of, max_calls=max_calls), host=host, port=port, on_ready=on_ready)
