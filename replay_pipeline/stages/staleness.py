"""Find out why work must be redone: compare the inputs of a stage then and now.

`run`, `status --stale`, the checks before publishing, and the code versions in Dagster use this
module.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from replay_pipeline.errors import CheckFailedError
from replay_pipeline.settings import Settings
from replay_pipeline.stages.overview import Overview, hash_texts
from replay_pipeline.stages.project import Project
from replay_pipeline.stages.receipts import Receipt, Written
from replay_pipeline.stages.stage import Changes, Stage
from replay_pipeline.stages.versions import versions_of

UNKNOWN = "unknown"
"""The reason if a receipt of an older version doesn't name its inputs."""

NEW_ROWS = "new rows of {}"
"""The reason if the inputs were rewritten after the receipt."""

_MAX_NAMED, _MAX_SHOWN = 3, 60
"""The most inputs to name one by one, and the most characters of a value to show."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """Everything that decides the output of a stage."""

    versions: Mapping[str, str]
    """Digest of each part of the code."""
    settings: Mapping[str, Any]
    """Values by the full names of the settings."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Digests of the inputs."""

    @cached_property
    def code_version(self) -> str:
        """Return one digest of the code and the settings, without the inputs."""
        return hash_texts([json.dumps([self.versions, self.settings], sort_keys=True)])

    @cached_property
    def fingerprint(self) -> str:
        """Return one digest of everything."""
        return hash_texts([self.code_version, json.dumps(dict(self.inputs), sort_keys=True)])


def declared(stage: Stage, settings: Settings) -> Given:
    """Return the code and settings that decide the output of a stage, for any input.

    Raises:
        ConfigError: a file that the settings name cannot be read.
    """
    flat = dict(sorted(_flat(stage.settings(settings))))
    return Given(
        versions=versions_of(stage.parts(settings)),
        settings=json.loads(json.dumps(flat, default=str)),  # as a receipt brings it back
    )


def given_of(stage: Stage, project: Project, batch: str, *, declares: Given | None = None) -> Given:
    """Return everything that decides the output of a stage for a batch.

    Args:
        stage: the stage.
        project: the data root.
        batch: the batch.
        declares: the result of `declared`, if known.
    """
    inputs = {**project.known_digests(batch, stage.reads), **stage.inputs(project, batch)}
    return replace(declares or declared(stage, project.settings), inputs=inputs)


def _flat(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def changes_since(receipt: Receipt | Written, given: Given) -> Changes:
    """Return the differences between a stage's inputs then and now."""
    is_coded = bool(receipt.versions) or not given.versions
    code = {part for part, now in given.versions.items() if receipt.versions.get(part) != now}
    code = code if is_coded else set()
    if receipt.settings is None:
        return Changes(code=tuple(sorted(code)), is_unknown=True)
    before, after = receipt.settings, given.settings
    names = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    if names & before.keys() & after.keys():
        # One setting may bring others into play, and code: it is the reason, and they are not.
        names &= before.keys() & after.keys()
        code &= receipt.versions.keys()
    return Changes(
        code=tuple(part for part in given.versions if part in code),
        is_unknown=not is_coded,
        settings=tuple(
            f"{name}: {_shown(before.get(name))} → {_shown(after.get(name))}"
            for name in sorted(names)
        ),
        inputs=tuple(
            name
            for name in {**receipt.inputs, **given.inputs}
            if receipt.inputs.get(name) != given.inputs.get(name)
        ),
    )


def _shown(value: Any) -> str:
    each = value if isinstance(value, list) else [value]
    text = ", ".join("none" if item is None else str(item) for item in each) or "none"
    return text if len(text) <= _MAX_SHOWN else hash_texts([text])[:8]


def reasons(stage: Stage, changes: Changes) -> list[str]:
    """Describe changes in words: parts of the code, settings with both values, and inputs."""
    found = [*changes.code, *changes.settings]
    if len(changes.inputs) > _MAX_NAMED and not stage.is_by_batch:
        found.append(NEW_ROWS.format(f"{len(changes.inputs):,} batches"))
    else:
        found += [NEW_ROWS.format(name) for name in changes.inputs]
    return [*found, UNKNOWN] if changes.is_unknown else found


def reasons_by_batch(
    project: Project, stages: Iterable[Stage], *, batches: Collection[str] | None = None
) -> dict[str, dict[str, list[str]]]:
    """Return the reasons why results are stale, by batch and stage, without fresh ones.

    Args:
        project: the data root.
        stages: the stages to check, without those that a run would leave out.
        batches: the batches to check. By default, all.

    Raises:
        ConfigError: a file that the settings name cannot be read.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for stage in stages:
        if not stage.is_wanted(project.settings):
            continue
        declares = declared(stage, project.settings)
        for receipt in _receipts(project, stage):
            if batches is not None and receipt.batch not in batches:
                continue
            given = given_of(stage, project, receipt.batch, declares=declares)
            if why := reasons(stage, changes_since(receipt, given)):
                found.setdefault(receipt.batch, {})[stage.name] = why
    return dict(sorted(found.items()))


def told_reasons(project: Overview, stage: Stage, declares: Given) -> dict[str, int]:
    """Return why batches are stale by code and settings alone, with counts.

    It reads no table, so Dagster's pages can quickly show why a batch is stale. Dagster itself
    shows which inputs changed.

    Args:
        project: the data root.
        stage: the stage.
        declares: the result of `declared`.
    """
    found: Counter[str] = Counter()
    for receipt in _receipts(project, stage):
        changes = changes_since(receipt, replace(declares, inputs=receipt.inputs))
        found.update(reasons(stage, changes))
    return dict(sorted(found.items()))


def _receipts(project: Overview, stage: Stage) -> Iterator[Receipt | Written]:
    """Return the receipts of a stage; those of many batches without what is long."""
    if stage.is_by_batch:
        yield from project.receipts.written(stage.name)
    elif (receipt := project.receipts.read(stage.name, "all")) is not None:
        yield receipt


def read_again(project: Project, stages: Iterable[Stage]) -> set[str]:
    """Return the batches with a table that was rewritten after a later stage read it."""
    tables = {
        (receipt.batch, table): digest
        for receipt in project.receipts.written()
        for table, digest in receipt.outputs.items()
    }
    return {
        receipt.batch
        for stage in stages
        for receipt in project.receipts.written(stage.name)
        for table in stage.reads
        if (digest := receipt.inputs.get(table))
        and tables.get((receipt.batch, table), digest) != digest
    }


def refuse_stale(project: Project, stages: Iterable[Stage], batches: Collection[str]) -> None:
    """Check that today's rules redacted everything that these batches would publish.

    Raises:
        CheckFailedError: a batch was redacted by older rules, or its pairs come from such rows.
    """
    stages = [stage for stage in stages if stage.unsafe]
    for batch, found in reasons_by_batch(project, stages, batches=batches).items():
        for stage in stages:
            for reason in found.get(stage.name, ()):
                if reason.startswith(stage.unsafe):
                    raise CheckFailedError(
                        f"nothing was published: the result of stage `{stage.name}` for batch {batch} is "
                        f"stale ({reason}), so its texts may contain secrets that today's rules would remove. `replay-pipeline run` redoes stale work and pays for nothing twice; "
                        "`replay-pipeline status --stale` lists it"
                    )
