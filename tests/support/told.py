"""What a refusal says."""

from collections.abc import Callable
from typing import Any

import pytest


def told_by(
    error: type[Exception] | tuple[type[Exception], ...],
    action: Callable[..., Any],
    *arguments: Any,
    **options: Any,
) -> str:
    """Give the message of the error that an action must end with."""
    with pytest.raises(error) as told:
        action(*arguments, **options)
    return str(told.value)
