"""The only import of data-juicer, which keeps it from installing, downloading, and logging.

By itself, data-juicer 1.6 installs Ray when an operator is built, installs further packages when
one is missing, and prints through its own logger. Here it gets stand-ins for its Ray modules, an
installer that refuses, and a silent logger.
"""

import functools
import importlib
import logging
import sys
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from replay_pipeline.errors import ConfigError, MissingDependencyError
from replay_pipeline.normalize.recipe import inner_arguments

logger = logging.getLogger(__name__)

_RAY_MODULES = {
    "data_juicer.core.executor.ray_executor": ("RayExecutor", "TempDirManager"),
    "data_juicer.core.executor.ray_executor_partitioned": ("PartitionedRayExecutor",),
    "data_juicer.core.ray_analyzer": ("RayAnalyzer",),
    "data_juicer.core.ray_exporter": ("RayExporter",),
}
_IN_PROCESS = {"auto_op_parallelism": False, "num_proc": None, "skip_op_error": False}
"""Arguments that keep an operator in this process and let its errors through."""


@contextmanager
def _root_logger_untouched() -> Iterator[None]:
    """Undo what an import in there does: it adds a handler to the root logger and raises its level."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@functools.cache
def load(*, with_ray: bool = False) -> Mapping[str, type]:
    """Import data-juicer and our operators, and return all operators by name.

    Raises:
        MissingDependencyError: data-juicer or a package that it imports is missing.
    """
    if not with_ray:
        for name, attributes in _RAY_MODULES.items():
            stand_in = types.ModuleType(name)
            stand_in.__dict__.update(dict.fromkeys(attributes))
            sys.modules.setdefault(name, stand_in)
    try:
        with warnings.catch_warnings(), _root_logger_untouched():
            warnings.simplefilter("ignore")  # of its imports, not of our rows
            importlib.import_module("loguru").logger.disable("data_juicer")
            lazy = importlib.import_module("data_juicer.utils.lazy_loader")
            lazy.LazyLoader._install_package = classmethod(_refuse)
            modules = importlib.import_module("data_juicer.ops").OPERATORS.modules
            importlib.import_module("data_juicer.core.data")
            importlib.import_module("replay_pipeline.normalize.operators")
    except ImportError as error:
        raise MissingDependencyError(
            f"data-juicer cannot be imported ({error}): pip install 'replay-pipeline[normalize]', or "
            "keep every pair with `replay-pipeline normalize --recipe none`"
        ) from error
    return modules


def _refuse(cls: type, package: str, pip_args: Any = None) -> None:  # noqa: ARG001
    raise MissingDependencyError(
        f"a data-juicer operator needs the package {package!r}; install it and run again"
    )


def build_operators(process: Sequence[Mapping[str, Any]], *, where: str) -> list[Any]:
    """Make the operators of a recipe's `process` list, in order.

    Raises:
        ConfigError: an operator or parameter is unknown, has the wrong type, or is refused by the
            operator. The message begins with `where` and lists the known names.
        MissingDependencyError: data-juicer, or a package that an operator needs, is missing.
    """
    if not process:
        return []
    modules = load()
    preflight = importlib.import_module("data_juicer.core.preflight")
    try:
        inner = (_judging(*part) for step in process for part in step.items())
        preflight.pre_instantiation_check([*map(dict, process), *filter(None, inner)])
    except preflight.PipelineConfigError as error:
        raise ConfigError(f"{where}: {_in_words(error.errors, modules, preflight)}") from error
    operators = []
    for step in process:
        ((name, arguments),) = step.items()
        try:
            operators.append(modules[name](**{**_IN_PROCESS, **(arguments or {})}))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{where}: {name}: {error}") from error
    return operators


def _judging(name: str, arguments: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the filter of data-juicer that judges the sides in a step, or None."""
    given = arguments or {}
    if name != "pair_each_side_filter" or not given.get("operator"):
        return None
    return {given["operator"]: inner_arguments(given.get("arguments"))}


def _in_words(errors: Sequence[Any], modules: Mapping[str, type], preflight: Any) -> str:
    lines = []
    for error in errors:
        line = str(error)
        if error.op_name not in modules:
            ours = ", ".join(name for name in sorted(modules) if name.startswith("pair_"))
            line += f"; ours are {ours}; data-juicer brings {len(modules)} operators in all"
        elif "parameter" in error.message.lower():
            own = [
                name
                for name in preflight._get_valid_params(modules[error.op_name])
                if name not in modules[error.op_name]._BASE_PARAMS
            ]
            line += f"; it takes {', '.join(own) or 'no parameters of its own'}"
        lines.append(line)
    return "; ".join(lines)
