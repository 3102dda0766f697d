"""Claude Code in many versions: fetched by npm, started in an empty home, against a scripted model."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

VERSIONS = (
    "2.1.39", "2.1.49", "2.1.81", "2.1.113", "2.1.150", "2.1.220", "2.1.280", "2.1.310", "2.1.330", "2.1.332",
)  # fmt: skip
FIRST_WITH_REQUESTS = (2, 1, 310)
"""The first version that logs its requests."""
_FIRST_NATIVE = (2, 1, 113)
"""From here on the package holds a program, and before it a script for node."""
FOLDER = Path(os.environ.get("CLIENTS", "build/clients")).resolve()


def numbers_of(version: str) -> tuple[int, ...]:
    """Return a version as numbers, which can be compared."""
    return tuple(map(int, version.split(".")))


def client(version: str) -> list[str]:
    """Return the command of a version of the client; npm brings it the first time."""
    is_native = numbers_of(version) >= _FIRST_NATIVE
    name = "@anthropic-ai/claude-code" + ("-linux-x64" if is_native else "")
    inside = "claude" if is_native else "cli.js"
    return packed(f"{name}@{version}", FOLDER / version, inside)


def packed(package: str, folder: Path, inside: str) -> list[str]:
    """Return the command of a program in a package; npm brings it the first time."""
    program = folder / "package" / inside
    if not program.exists():
        folder.mkdir(parents=True, exist_ok=True)
        archive = subprocess.run(
            ["npm", "pack", "--silent", package],
            cwd=folder, check=True, capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip
        shutil.unpack_archive(folder / archive, folder)
        (folder / archive).unlink()
    is_script = program.suffix == ".js"
    return [shutil.which("node") or "node", str(program)] if is_script else [str(program)]


_IDENTITY = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "Test"), ("EMAIL", "test@example.com"))
}


class Place:
    """A home folder and a project in which a client works."""

    def __init__(self, folder: Path) -> None:
        self.home, self.project = folder / "home", folder / "project"
        self.said = ""
        """What the client printed."""
        self.home.mkdir(parents=True)
        self.project.mkdir()
        (self.project / "a.py").write_text("def f():\n    return 1\n\n\nprint(f())\n")
        env = {"PATH": os.environ["PATH"], "HOME": str(self.home), **_IDENTITY}
        for arguments in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "First"]):
            subprocess.run(["git", *arguments], cwd=self.project, env=env, check=True)


class Desk(Place):
    """One for Claude Code."""

    @property
    def logs(self) -> Path:
        """The folder of session files."""
        return self.home / ".claude" / "projects"

    def env(self, url: str = "") -> dict[str, str]:
        """Return the environment of the client, in which nothing of ours is."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "dummy",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "DISABLE_AUTOUPDATER": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            **_IDENTITY,
        }

    def settings(self, **settings: Any) -> None:
        """Write the user's settings."""
        path = self.home / ".claude" / "settings.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(settings))

    def run(
        self, command: list[str], url: str, *options: str, stdin: str = "", timeout_s: float = 120.0
    ) -> str:
        """Run the client to its end; returns what it printed."""
        done = subprocess.run(
            [*command, *options],
            cwd=self.project, env=self.env(url), input=stdin, capture_output=True, text=True,
            timeout=timeout_s,
        )  # fmt: skip
        return done.stdout + done.stderr
