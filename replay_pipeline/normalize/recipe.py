"""Recipes: plain data-juicer YAML files. Use ours by name, or any file by path."""

import difflib
import hashlib
import json
import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from replay_pipeline.errors import ConfigError, UntrustedError
from replay_pipeline.normalize.pair import SIDES

logger = logging.getLogger(__name__)

_WITHOUT_EFFECT = frozenset(
    {"project_name", "text_keys", "np", "use_cache", "turbo", "open_tracer"}
)
"""Fields that data-juicer's own runner wants to see, and that are no matter here."""
_EXECUTES_NOTHING = frozenset(
    [
        "alphanumeric_filter",
        "average_line_length_filter",
        "character_repetition_filter",
        "maximum_line_length_filter",
        "special_characters_filter",
        "text_length_filter",
        "word_repetition_filter",
        "words_num_filter",
    ]
)
"""Filters of data-juicer that look at a text and do nothing else. Others run Python that is in the
recipe, load models (some with code of their own), ask services, or read and write files."""
_EXECUTES = {
    "tokenization": (True, "sentencepiece"),
    "runtime_env": None,
    "stats_export_path": None,
    "work_dir": None,
}
"""Arguments that have even a plain operator load a model, install packages or write files, with the
values that do; `None`: any."""
_INSTALLED = Path(__file__).parent / "recipes"
_CHECKOUT = Path(__file__).parents[2] / "recipes" / "replaysim"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The `process` list of a data-juicer recipe, and its source."""

    name: str
    path: Path
    process: tuple[dict[str, dict[str, Any]], ...]

    @property
    def labels(self) -> list[str]:
        """Number and name of each step."""
        return [f"{number}.{name}" for number, step in enumerate(self.process) for name in step]

    @property
    def sha(self) -> str:
        """Hash of the steps. Recipes with equal steps are the same recipe."""
        text = json.dumps(self.process, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def recipes_dir() -> Path:
    """Return the folder of the bundled recipes, in a wheel or in a source checkout."""
    return _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT


def bundled_recipes() -> list[str]:
    """Return the names of the bundled recipes."""
    return sorted(path.stem for path in recipes_dir().glob("*.yaml"))


def load_recipe(recipe: str | Path, *, allow_operators: Collection[str] = ()) -> Recipe:
    """Read a bundled recipe by name, or a YAML file by path.

    Raises:
        UntrustedError: an operator executes something and isn't allowed.
        ConfigError: the recipe doesn't exist, the file isn't a data-juicer recipe, or an operator
            isn't one for pairs.
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
    if not isinstance(steps, list) or not (steps or path.stem == "none"):
        raise ConfigError(f"recipe {path}: no `process` list, as data-juicer recipes have")
    if unused := sorted(map(str, set(content) - _WITHOUT_EFFECT - {"process"})):
        logger.warning(
            "recipe %s: only `process` is read; %s has no effect", path, ", ".join(unused)
        )
    process = []
    for step in steps:
        name, arguments = _parts(step, path)
        if name not in allow_operators:
            _check_harmless(name, arguments, where=f"recipe {path}")
        process.append(_for_pairs(name, arguments, f"recipe {path}"))
    return Recipe(name=path.stem, path=path, process=tuple(process))


def _parts(step: Any, path: Path) -> tuple[str, dict[str, Any]]:
    if isinstance(step, str):
        return step, {}
    if isinstance(step, dict) and len(step) == 1:
        ((name, arguments),) = step.items()
        if isinstance(name, str) and isinstance(arguments, dict | None):
            return name, arguments or {}
    raise ConfigError(
        f"recipe {path}: a step must be an operator with its parameters, not {step!r}"
    )


def _check_harmless(name: str, arguments: dict[str, Any], *, where: str) -> None:
    if name == "pair_each_side_filter":
        inner = inner_arguments(arguments.get("arguments"))
        return _check_harmless(str(arguments.get("operator")), inner, where=where)
    known = name.startswith("pair_") or name in {*_EXECUTES_NOTHING, "document_deduplicator"}
    doing = [
        f"{key}: {value}"
        for key, value in arguments.items()
        if key in _EXECUTES and value in (_EXECUTES[key] or (value,))
    ]
    if known and not doing:
        return None
    if not known and (close := difflib.get_close_matches(name, _EXECUTES_NOTHING, n=1, cutoff=0.8)):
        raise ConfigError(
            f"{where}: {name} is not one of {', '.join(sorted(_EXECUTES_NOTHING))}; did you mean {close[0]}?"
        )
    what = f"{name} ({', '.join(doing)})" if doing else name
    raise UntrustedError(
        f"{where}: {what} may run programs, load models or reach the network, so a recipe can't use it by itself. If you trust this recipe, allow the operator by name: --allow-operator {name}, or "
        f'`allow_operators = ["{name}"]` under [normalize]'
    )


def _for_pairs(name: str, arguments: dict[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Return a step as it runs on pairs: a filter of data-juicer judges both sides, or the one in `text_key`.

    Raises:
        ConfigError: the operator isn't one for pairs.
    """
    if name == "document_deduplicator":
        return {"pair_exact_deduplicator": arguments}
    if name.startswith("pair_") and name != "pair_each_side_filter":
        return {name: arguments}
    if not name.endswith("_filter"):
        raise ConfigError(
            f"{where}: {name}: a recipe for pairs may have filters, document_deduplicator, and our "
            "pair_* operators. What edits, groups or draws rows would leave pairs without a reason"
        )
    given = arguments
    if name != "pair_each_side_filter":
        inner = {key: value for key, value in arguments.items() if key != "text_key"}
        given = {"operator": name, "arguments": json.dumps(inner, sort_keys=True)}
        given |= {"sides": [arguments["text_key"]]} if "text_key" in arguments else {}
    # Each is given: data-juicer has a second use inherit what it leaves out from the first.
    return {"pair_each_side_filter": {"sides": list(SIDES), "view": "text", **given}}


def inner_arguments(given: dict[str, Any] | str | None) -> dict[str, Any]:
    """Return the parameters of an operator that another one runs, which may be JSON text.

    Raises:
        ValueError: they aren't a mapping.
    """
    found = json.loads(given) if isinstance(given, str) else given
    if not isinstance(found, dict | None):
        raise ValueError(f"arguments is {given!r}, but must be a mapping")
    return dict(found or {})
