"""Recipes: plain data-juicer YAML files, ours by name or anyone's by path."""

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from replay_pipeline.errors import ConfigError

logger = logging.getLogger(__name__)

_WITHOUT_EFFECT = frozenset(
    {"project_name", "text_keys", "np", "use_cache", "turbo", "open_tracer"}
)
"""Fields that data-juicer's own runner wants to see, and that are no matter here."""
_INSTALLED = Path(__file__).parent / "recipes"
_CHECKOUT = Path(__file__).parents[2] / "recipes" / "replaysim"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The `process` list of a data-juicer recipe, and where it came from."""

    name: str
    path: Path
    process: tuple[dict[str, dict[str, Any]], ...]

    @property
    def labels(self) -> list[str]:
        """Number and name of each step."""
        return [f"{number}.{name}" for number, step in enumerate(self.process) for name in step]

    @property
    def sha(self) -> str:
        """Hash of the steps: two recipes with equal steps are the same recipe."""
        text = json.dumps(self.process, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def recipes_dir() -> Path:
    """The folder of the bundled recipes, in a wheel and in a source checkout alike."""
    return _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT


def bundled_recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(path.stem for path in recipes_dir().glob("*.yaml"))


def load_recipe(recipe: str | Path) -> Recipe:
    """Read a bundled recipe by name, or a YAML file by path.

    Raises:
        ConfigError: there is no such recipe, or the file is not a data-juicer recipe.
    """
    names = bundled_recipes()
    path = recipes_dir() / f"{recipe}.yaml" if str(recipe) in names else Path(recipe)
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"recipe {str(recipe)!r}: neither a file nor one of {', '.join(names)}"
        ) from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"recipe {path}: {error}") from error
    steps = content.get("process") if isinstance(content, dict) else None
    if not isinstance(steps, list) or not steps:
        raise ConfigError(f"recipe {path}: no `process` list, as data-juicer recipes have")
    if unused := sorted(map(str, set(content) - _WITHOUT_EFFECT - {"process"})):
        logger.warning(
            "recipe %s: only `process` is read; %s has no effect", path, ", ".join(unused)
        )
    return Recipe(name=path.stem, path=path, process=tuple(_step(step, path) for step in steps))


def _step(step: Any, path: Path) -> dict[str, dict[str, Any]]:
    if isinstance(step, str):
        return {step: {}}
    if isinstance(step, dict) and len(step) == 1:
        ((name, arguments),) = step.items()
        if isinstance(name, str) and isinstance(arguments, dict | None):
            return {name: arguments or {}}
    raise ConfigError(f"recipe {path}: a step is an operator with its parameters, not {step!r}")
