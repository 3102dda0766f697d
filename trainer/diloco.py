"""Another name of `trainer.outer`, from the published method."""

from typing import Any

from trainer import outer

__all__ = outer.__all__


def __getattr__(name: str) -> Any:
    return getattr(outer, name)


def __dir__() -> list[str]:
    return dir(outer)
