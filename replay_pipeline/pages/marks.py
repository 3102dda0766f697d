"""Marks that people gave to pairs."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from replay_pipeline.errors import ConfigError, StorageError
from replay_pipeline.storage.pair_rows import id_of_pair
from replay_pipeline.types import DPOPair

Mark = Literal["accept", "reject"]

FORMAT = "replay-pipeline marks 2"


def read_marks(path: Path) -> dict[str, Mark]:
    """Read the marks that a review page exported, by pair.

    Raises:
        StorageError: the file cannot be read.
        ConfigError: it is no export of a review page.
    """
    exported = _exported(path)
    marks = exported.get("marks")
    if not isinstance(marks, dict):
        raise ConfigError(f"{path}: 'marks' is not an object")
    for pair_id, mark in marks.items():
        if mark not in get_args(Mark):
            raise ConfigError(f"{path}: {pair_id}: {mark!r} is neither 'accept' nor 'reject'")
    return marks


def read_chances(path: Path) -> dict[str, float]:
    """Read the probability with which each pair was chosen for the page; empty if the page showed all pairs.

    Raises:
        StorageError: the file cannot be read.
        ConfigError: it is no export of a review page.
    """
    chances = _exported(path).get("chances") or {}
    if not isinstance(chances, dict) or not all(
        isinstance(chance, int | float) and 0 < chance <= 1 for chance in chances.values()
    ):
        raise ConfigError(f"{path}: 'chances' must map each pair to a probability")
    return chances


def _exported(path: Path) -> dict[str, Any]:
    try:
        exported = json.loads(path.read_bytes())
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON; export the marks from the review page") from error
    if not isinstance(exported, dict) or exported.get("format") != FORMAT:
        raise ConfigError(f"{path}: not an export of a review page (format {FORMAT!r})")
    return exported


def apply_marks(
    pairs: Iterable[DPOPair], marks: Mapping[str, Mark], *, only_accepted: bool = False
) -> list[DPOPair]:
    """Remove the rejected pairs, or keep only the accepted ones.

    A mark belongs to a pair and not to its state. Other pairs of the state stay. A pair whose sides
    have changed since it was marked also stays.
    """
    marked = ((pair, marks.get(id_of_pair(pair))) for pair in pairs)
    if only_accepted:
        return [pair for pair, mark in marked if mark == "accept"]
    return [pair for pair, mark in marked if mark != "reject"]
