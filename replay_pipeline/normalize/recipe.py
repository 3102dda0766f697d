"""Recipes: plain data-juicer YAML files. Use ours by name, or any file by path."""

import hashlib
import json
import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from replay_pipeline.errors import ConfigError, UntrustedError
from replay_pipeline.normalize.views import SIDES

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
        "specified_field_filter",
        "specified_numeric_field_filter",
        "suffix_filter",
        "text_length_filter",
        "word_repetition_filter",
        "words_num_filter",
        "clean_copyright_mapper",
        "clean_email_mapper",
        "clean_html_mapper",
        "clean_ip_mapper",
        "clean_links_mapper",
        "expand_macro_mapper",
        "fix_unicode_mapper",
        "punctuation_normalization_mapper",
        "remove_bibliography_mapper",
        "remove_comments_mapper",
        "remove_header_mapper",
        "remove_long_words_mapper",
        "remove_non_chinese_character_mapper",
        "remove_specific_chars_mapper",
        "remove_table_text_mapper",
        "replace_content_mapper",
        "whitespace_normalization_mapper",
        "document_deduplicator",
        "document_line_deduplicator",
        "document_minhash_deduplicator",
        "document_simhash_deduplicator",
        "frequency_specified_field_selector",
        "random_selector",
        "range_specified_field_selector",
        "tags_specified_field_selector",
        "topk_specified_field_selector",
    ]
)
"""Operators of data-juicer that look at text and do nothing else. Others run Python that is in the
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

    Args:
        recipe: name or path.
        allow_operators: further operators that the recipe may use although they execute something.

    Raises:
        UntrustedError: an operator executes something and isn't allowed.
        ConfigError: the recipe doesn't exist, or the file isn't a data-juicer recipe.
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
    process = tuple(_step(step, path) for step in steps)
    for step in process:
        for name, arguments in step.items():
            if name not in allow_operators:
                _check_harmless(name, arguments, where=f"recipe {path}")
    return Recipe(
        name=path.stem,
        path=path,
        process=tuple(_for_pairs(step, f"recipe {path}") for step in process),
    )


_SIDE_FILTERS = frozenset(
    name
    for name in _EXECUTES_NOTHING
    if name.endswith("_filter") and not name.startswith(("specified_", "suffix_"))
)
"""Filters of data-juicer that read one text."""
_ON_PAIRS = {
    "text_length_filter": ("pair_text_length_filter", {"min_len": 10}),
    "special_characters_filter": ("pair_special_characters_filter", {"max_ratio": 0.25}),
    "document_deduplicator": (
        "pair_exact_deduplicator",
        {"lowercase": False, "ignore_non_character": False, "keys": ["prompt", *SIDES]},
    ),
}
"""Operators of data-juicer that ours decide alike on both sides, faster, with their own defaults."""


_SIDE_MAPPERS = frozenset(name for name in _EXECUTES_NOTHING if name.endswith("_mapper"))
"""Mappers of data-juicer that edit one text."""
_NEAR = {"jaccard_threshold": 0.7, "window_size": 5, "num_permutations": 256}
"""What MinHash takes on pairs, with data-juicer's defaults."""
_NEEDS_A_TEXT = {
    "document_line_deduplicator": "takes lines out of texts",
    "document_simhash_deduplicator": "compares one text of each row",
    "suffix_filter": "judges the name of the file that a row came from, and pairs come from none",
}


def _for_pairs(step: dict[str, dict[str, Any]], where: str) -> dict[str, dict[str, Any]]:
    """Return a step as it is run on pairs: what reads one text, and does not say which, reads both sides.

    data-juicer's text is a column that pairs do not have.

    Raises:
        ConfigError: the operator needs a text and names none, or has a parameter that pairs do not allow.
    """
    ((name, arguments),) = step.items()
    if "text_key" in arguments:
        return step
    if name in _ON_PAIRS and not set(arguments) & {"batch_size", "turbo", "num_proc"}:
        ours, defaults = _ON_PAIRS[name]
        return {ours: defaults | arguments}
    if name == "document_minhash_deduplicator":
        plain = {"lowercase": True, "tokenization": "space"}
        odd = [key for key in arguments if arguments[key] != plain.get(key) and key not in _NEAR]
        if odd:
            raise ConfigError(
                f"{where}: {name}: on pairs it takes {', '.join(_NEAR)}, not {odd[0]}"
            )
        near = {key: value for key, value in arguments.items() if key in _NEAR}
        return {"pair_near_deduplicator": _NEAR | near}
    if name in _SIDE_FILTERS:
        inner = json.dumps(arguments, sort_keys=True)
        return {"pair_each_side_filter": {"operator": name, "arguments": inner}}
    if name in _SIDE_MAPPERS:
        inner = json.dumps(arguments, sort_keys=True)
        return {"pair_each_side_mapper": {"operator": name, "arguments": inner}}
    if name in _NEEDS_A_TEXT:
        raise ConfigError(
            f"{where}: {name} {_NEEDS_A_TEXT[name]}: set its text_key to a column of pairs, such as "
            "chosen, or leave it out"
        )
    return step


def inner_arguments(given: dict[str, Any] | str | None) -> dict[str, Any]:
    """Return the parameters of an operator that another one runs, which may be JSON text.

    Raises:
        ValueError: they aren't a mapping.
    """
    found = json.loads(given) if isinstance(given, str) else given
    if not isinstance(found, dict | None):
        raise ValueError(f"arguments is {given!r}, but must be a mapping")
    return dict(found or {})


def _check_harmless(name: str, arguments: dict[str, Any], *, where: str) -> None:
    if name in ("pair_each_side_filter", "pair_each_side_mapper"):
        inner = inner_arguments(arguments.get("arguments"))
        return _check_harmless(str(arguments.get("operator")), inner, where=where)
    is_known = name.startswith("pair_") or name in _EXECUTES_NOTHING
    doing = [
        f"{key}: {value}"
        for key, value in arguments.items()
        if key in _EXECUTES and value in (_EXECUTES[key] or (value,))
    ]
    if is_known and not doing:
        return None
    what = f"{name} ({', '.join(doing)})" if doing else name
    raise UntrustedError(
        f"{where}: {what} may run programs, load models or reach the network, so a recipe can't use it by itself. If you trust this recipe, allow the operator by name: --allow-operator {name}, or "
        f'`allow_operators = ["{name}"]` under [normalize]'
    )


def _step(step: Any, path: Path) -> dict[str, dict[str, Any]]:
    if isinstance(step, str):
        return {step: {}}
    if isinstance(step, dict) and len(step) == 1:
        ((name, arguments),) = step.items()
        if isinstance(name, str) and isinstance(arguments, dict | None):
            return {name: arguments or {}}
    raise ConfigError(
        f"recipe {path}: a step must be an operator with its parameters, not {step!r}"
    )
