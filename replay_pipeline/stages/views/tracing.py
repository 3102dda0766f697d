"""Follow one state through every stage, from the stages' own inputs and outputs."""

from collections.abc import Mapping
from typing import Any

import pyarrow.compute as pc

from replay_pipeline.errors import ConfigError
from replay_pipeline.stages import chain
from replay_pipeline.stages.project import Project
from replay_pipeline.stages.receipts import ALL

_KEYS = (("state_id",), ("session_id", "turn_idx"), ("session_id",))
"""What tells the rows of a state: the first of these that a table has."""


def trace_state(project: Project, beginning: str) -> dict[str, Any]:
    """Return the rows and facts of one state in each stage.

    Raises:
        ConfigError: no state id, or more than one, begins with this.
    """
    batch, state_id = _found(project, beginning)
    state = next(each for each in project.states([batch]) if each["state_id"] == state_id)
    rows = _rows(project, "states", batch, {"state_id": state_id})
    life: dict[str, Any] = {}
    done: set[str] = set()
    for stage in chain.STAGES:
        tables = {
            table: found
            for table in stage.writes
            if project.root.has(table, batch) and (found := _rows(project, table, batch, rows[0]))
        }
        if project.receipts.read(stage.name, batch if stage.is_by_batch else ALL):
            done.add(stage.name)
        # What is done next on all of them is shown as it would be: a dataset before it is trained on.
        is_next = not stage.is_by_batch and {each.name for each in chain.upstream(stage)} <= done
        is_shown = stage.name in done or is_next
        life[stage.name] = {**tables, **(stage.trace(project, batch, state) if is_shown else {})}
    return {"state_id": state_id, "trace_batch": batch, **life}


def _found(project: Project, beginning: str) -> tuple[str, str]:
    """Return the batch and the whole id of the state that begins so.

    Raises:
        ConfigError: no state or more than one has such an id.
    """
    found = [
        (batch, state_id)
        for batch in project.root.batches("states")
        for state_id in project.root.read("states", batch, columns=["state_id"])[0].to_pylist()
        if state_id.startswith(beginning)
    ]
    if not found:
        raise ConfigError(f"no state has an id that begins with {beginning!r}")
    if len(found) > 1:
        raise ConfigError(
            f"{len(found)} states have ids that begin with {beginning!r}: add characters"
        )
    return found[0]


def _rows(project: Project, table: str, batch: str, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a table that are about the same state, without empty columns."""
    rows = project.root.read(table, batch)
    keys = next((keys for keys in _KEYS if {*keys} <= {*rows.column_names} & {*row}), None)
    if keys is None:
        return []
    for key in keys:
        rows = rows.filter(pc.field(key) == row[key])
    return [
        {name: value for name, value in found.items() if value not in (None, [], "")}
        for found in rows.to_pylist()
    ]
