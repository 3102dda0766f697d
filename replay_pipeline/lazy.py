"""Import slow modules only when they are needed."""

from importlib import import_module
from typing import Any


class OnFirstUse:
    """A module that is imported when an attribute is first read.

    `importlib.util.LazyLoader` doesn't work here: code that walks through `sys.modules`, as
    `inspect` does, would load the module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        """Return what the module has. Raises what importing it raises."""
        return getattr(import_module(self._name), attribute)
