"""Find out why work must be redone: compare the version, settings, and inputs then and now.

`run`, `status --stale`, the checks before publishing, and the code versions in Dagster use this
module.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from replay_pipeline.errors import CheckFailedError
from replay_pipeline.settings import Settings
from replay_pipeline.stages.project import Project
from replay_pipeline.stages.receipts import Given, hash_texts
from replay_pipeline.stages.stage import Changes, Stage

NEW_ROWS = "new rows of {}"
"""The reason if the inputs were rewritten after the receipt."""

_MAX_NAMED, _MAX_SHOWN = 3, 60
"""The most inputs to name one by one, and the most characters of a value to show."""


def declared(stage: Stage, settings: Settings) -> Given:
    """Return the version and settings that decide the output of a stage, for any input.

    Raises:
        ConfigError: a file that the settings name cannot be read.
    """
    flat = dict(sorted(_flat(stage.settings(settings))))
    as_in_receipt = json.loads(json.dumps(flat, default=str))
    return Given(version=stage.version, settings=as_in_receipt)


def given_of(stage: Stage, project: Project, batch: str, *, declares: Given | None = None) -> Given:
    """Return everything that decides the output of a stage for a batch."""
    tables = stage.reads if stage.is_by_batch else ()
    inputs = {**project.known_digests(batch, tables), **stage.inputs(project, batch)}
    return replace(declares or declared(stage, project.settings), inputs=inputs)


def _flat(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def changes_since(last: Given, given: Given) -> Changes:
    """Return the differences between what decided a stage's output then and now."""
    before, after = last.settings, given.settings
    names = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    if names & before.keys() & after.keys():
        # One setting may bring others into play: it is the reason, and they are not.
        names &= before.keys() & after.keys()
    is_same = last.version == given.version
    return Changes(
        version="" if is_same else f"version {last.version} → {given.version}",
        settings=tuple(
            f"{name}: {_shown(before.get(name))} → {_shown(after.get(name))}"
            for name in sorted(names)
        ),
        inputs=tuple(
            name
            for name in {**last.inputs, **given.inputs}
            if last.inputs.get(name) != given.inputs.get(name)
        ),
    )


def _shown(value: Any) -> str:
    each = value if isinstance(value, list) else [value]
    text = ", ".join("none" if item is None else str(item) for item in each) or "none"
    return text if len(text) <= _MAX_SHOWN else hash_texts([text])[:8]


def reasons(stage: Stage, changes: Changes) -> list[str]:
    """Describe changes in words: the version, settings with both values, and inputs."""
    found = [*filter(None, [changes.version]), *changes.settings]
    if len(changes.inputs) > _MAX_NAMED and not stage.is_by_batch:
        return [*found, NEW_ROWS.format(f"{len(changes.inputs):,} batches")]
    return found + [NEW_ROWS.format(name) for name in changes.inputs]


def changes_by_batch(
    project: Project, stages: Iterable[Stage], *, batches: Collection[str] | None = None
) -> Iterator[tuple[Stage, str, Changes]]:
    """Yield what has changed since stages worked on batches, for stale results only.

    Raises:
        ConfigError: a file that the settings name cannot be read.
    """
    for stage in stages:
        declares = declared(stage, project.settings)
        for receipt in project.receipts.all(stage=stage.name):
            if batches is None or receipt.batch in batches:
                given = given_of(stage, project, receipt.batch, declares=declares)
                if changes := changes_since(receipt, given):
                    yield stage, receipt.batch, changes


def reasons_by_batch(project: Project, stages: Iterable[Stage]) -> dict[str, dict[str, list[str]]]:
    """Return the reasons why results are stale, by batch and stage. Raises as `changes_by_batch`."""
    found: dict[str, dict[str, list[str]]] = {}
    for stage, batch, changes in changes_by_batch(project, stages):
        found.setdefault(batch, {})[stage.name] = reasons(stage, changes)
    return dict(sorted(found.items()))


def read_again(project: Project, stages: Iterable[Stage]) -> set[str]:
    """Return the batches with a table that was rewritten after a later stage read it."""
    receipts = [
        (stage, each) for stage in stages for each in project.receipts.all(stage=stage.name)
    ]
    tables = {
        (receipt.batch, table): digest
        for _, receipt in receipts
        for table, digest in receipt.outputs.items()
    }
    return {
        receipt.batch
        for stage, receipt in receipts
        for table, digest in receipt.inputs.items()
        # Of tools, a batch takes those of earlier batches as well: their digest is not the table's.
        if table in stage.reads and table != "tools"
        if tables.get((receipt.batch, table), digest) != digest
    }


def refuse_stale(project: Project, stages: Iterable[Stage], batches: Collection[str]) -> None:
    """Check that today's rules redacted everything that these batches would publish.

    Raises:
        CheckFailedError: a batch was read by older rules, or its pairs come from such rows.
    """
    free = [stage for stage in stages if stage.is_by_batch and not stage.pays]
    for stage, batch, changes in changes_by_batch(project, free, batches=batches):
        if set(changes.inputs) & set(stage.reads) or not stage.reads:
            raise CheckFailedError(
                f"nothing was published: the result of stage `{stage.name}` for batch {batch} is stale "
                f"({reasons(stage, changes)[0]}), so its texts may contain secrets that today's rules "
                "would remove. `replay-pipeline run` redoes stale work and pays for nothing twice; "
                "`replay-pipeline status --stale` lists it"
            )
