"""Find what would stop a run, before it starts."""

import importlib.metadata
import importlib.util
import platform
import shutil
from pathlib import Path
from typing import Any

from replay_pipeline.errors import MissingDependencyError
from replay_pipeline.ingesters import default_sources
from replay_pipeline.settings import Settings
from replay_pipeline.stages.budget.spending import checked_teachers
from replay_pipeline.stages.project import Project
from replay_pipeline.stages.work.discovery import repository_of

_EXTRAS = {
    "dagster": "dagster",
    "data_juicer": "normalize",
    "huggingface_hub": "publish",
    "torch": "train",
    "trl": "train",
    "aiohttp": "replay",
    "httpx": "replay",
    "httpx_aiohttp": "replay",
    "jsonschema": "replay",
    "numpy": "replay",
    "rensa": "replay",
    "websockets": "replay",
    "datasets": "train",
    "dagster_webserver": "dagster",
    "ray": "ray",
    "upath": "s3",
    "fsspec": "s3",
    "psycopg": "postgres",
    "dagster_postgres": "postgres",
}
_TRAINER = ("torch", "trl")
_LOOKED_AT = ("dagster", "data_juicer", "huggingface_hub", *_TRAINER)
_MIN_FREE_BYTES = 1_000_000_000


def in_one_line(error: ModuleNotFoundError) -> str | None:
    """Return a sentence that names the extra with a missing package, or None if no extra has it."""
    name = (error.name or "").partition(".")[0]
    extra = _EXTRAS.get(name)
    return extra and f"{name} is not installed: pip install 'replay-pipeline[{extra}]'"


def require_trainer() -> None:
    """Check that the packages for training are installed.

    Raises:
        MissingDependencyError: the trainer's packages are not installed.
    """
    for name in _TRAINER:
        if importlib.util.find_spec(name) is None:
            raise MissingDependencyError(
                f"{name} is not installed: pip install 'replay-pipeline[train]'"
            )


def require_extras(settings: Settings, *, with_training: bool) -> None:
    """Check that no missing package would stop the run, before anything is paid.

    Raises:
        MissingDependencyError: packages are missing. The message names all of their extras.
    """
    wanted = {"data_juicer": "recipe = 'none' in [normalize] keeps every pair"}
    if settings.normalize.recipe == "none":
        wanted = {}
    if with_training:
        wanted |= dict.fromkeys(_TRAINER, "--no-train leaves training out")
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        extras = ",".join(dict.fromkeys(_EXTRAS[name] for name in missing))
        without = "; ".join(dict.fromkeys(wanted[name] for name in missing))
        raise MissingDependencyError(
            f"{', '.join(missing)} not installed, so nothing was started: pip install "
            f"'replay-pipeline[{extras}]'. To go without: {without}"
        )


def examined(project: Project) -> list[dict[str, Any]]:
    """Check this machine and these settings.

    Returns one finding per check: `what`, `ok`, and a `detail` with the remedy if it fails.
    """
    findings = [
        _finding("python", platform.python_version(), ok=True),
        *map(_package, _LOOKED_AT),
        _disk(project.settings.local_dir()),
        _sources(project.settings),
    ]
    told: dict[str, str] = {}
    for teacher in checked_teachers(project):
        problem = teacher["problem"]
        if problem in told:
            problem = f"the same as {told[problem]}"
        elif problem is not None:
            told[problem] = teacher["teacher"]
        detail = problem or (
            f"{teacher['model']} at {teacher['base_url']}, "
            f"${teacher['prompt_usd_per_mtok']} / ${teacher['completion_usd_per_mtok']} per million "
            "tokens in / out"
        )
        findings.append(_finding(f"teacher {teacher['teacher']}", detail, ok=problem is None))
    return findings


def _finding(what: str, detail: str, *, ok: bool) -> dict[str, Any]:
    return {"what": what, "ok": ok, "detail": detail}


def _package(name: str) -> dict[str, Any]:
    if importlib.util.find_spec(name) is None:
        detail = f"not installed: pip install 'replay-pipeline[{_EXTRAS[name]}]'"
        return _finding(name, detail, ok=False)
    distribution = "py-data-juicer" if name == "data_juicer" else name
    return _finding(name, importlib.metadata.version(distribution), ok=True)


def _disk(folder: Path) -> dict[str, Any]:
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    detail = f"{free / 1e9:.1f} GB free under {folder}"
    return _finding("disk", detail, ok=free >= _MIN_FREE_BYTES)


def _sources(settings: Settings) -> dict[str, Any]:
    sources = list(settings.ingest.sources) or default_sources()
    if not sources:
        detail = "no folder of Claude Code found: name your sessions in `ingest.sources`"
        return _finding("sessions", detail, ok=False)
    missing = [str(p) for p in sources if not (repository_of(p) or p.exists())]
    detail = f"no such path: {', '.join(missing)}" if missing else ", ".join(map(str, sources))
    return _finding("sessions", detail, ok=not missing)
