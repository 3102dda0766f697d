"""Modules that take long to import, and that most commands never use."""

from importlib import import_module
from typing import Any


class OnFirstUse:
    """A module that is imported when something of it is first asked for.

    Not `importlib.util.LazyLoader`: whoever goes through `sys.modules`, as `inspect` does, would
    load what lies there.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        """Return what the module has. Raises what importing it raises."""
        return getattr(import_module(self._name), attribute)
