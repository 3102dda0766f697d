"""Dagster's own tests of its storages, out of its sources: its wheel does not have them."""

import importlib
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import dagster
import pytest


def suite(name: str) -> ModuleType:
    """Import a module of `dagster_tests.storage_tests` from the sources that `DAGSTER_SOURCE` names.

    Raises:
        pytest.UsageError: they are not there, or of another version than the Dagster installed.
    """
    source = Path(os.environ.get("DAGSTER_SOURCE") or "-")
    # A source distribution has the tests beside the package, a checkout has many packages.
    folders = [source, source / "python_modules" / "dagster"]
    found = [each for each in folders if (each / "dagster_tests" / "storage_tests").is_dir()]
    if not found:
        raise pytest.UsageError(
            f"DAGSTER_SOURCE={source}: no dagster_tests/storage_tests there; name a checkout or an "
            f"unpacked source distribution of Dagster {dagster.__version__}, or leave it to make"
        )
    versions = (found[0] / "dagster" / "version.py").read_text("utf-8")
    if (version := re.search(r'__version__ = "(.+)"', versions)) is None or (
        version[1] != dagster.__version__
    ):
        raise pytest.UsageError(
            f"DAGSTER_SOURCE={source}: it is Dagster {version and version[1]}, and "
            f"{dagster.__version__} is installed"
        )
    # At the end: what is tested is the Dagster that is installed.
    sys.path += [str(found[0]), str(source / "python_modules" / "dagster-test")]
    try:
        importlib.import_module("dagster_test")
    except ImportError:
        _make_runs_without_dagster_test()
    return importlib.import_module(f"dagster_tests.storage_tests.{name}")


def _make_runs_without_dagster_test() -> None:
    """Stand in for a package that no index has: the suite takes from it a run with defaults alone."""
    for name in ("dagster_test", "dagster_test.utils", "dagster_test.utils.data_factory"):
        sys.modules[name] = ModuleType(name)
    sys.modules[name].__dict__["dagster_run"] = dagster.DagsterRun
