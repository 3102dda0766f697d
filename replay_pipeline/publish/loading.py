"""Open the dataset with `datasets.load_dataset`, as its users do."""

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from replay_pipeline.errors import ConfigError, MissingDependencyError
from replay_pipeline.publish import layout


def rows_of(dataset: str, config: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a config of a dataset, a folder or a Hub id, each with its `split`.

    Raises:
        ConfigError: the dataset can't be read.
        MissingDependencyError: `datasets` isn't installed.
    """
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise MissingDependencyError(
            "datasets is not installed; pip install 'replay-pipeline[train]' brings it"
        ) from error
    try:
        splits = datasets.load_dataset(dataset, config)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise ConfigError(f"{dataset}: cannot read {config} ({error})") from error
    for split, rows in splits.items():
        for row in rows:
            yield {**row, "split": split}


def problems_of_loading(
    folder: Path, rows: Mapping[str, Mapping[str, int]]
) -> tuple[list[str], int] | None:
    """Load every config and split, as a whole and as a stream.

    Returns:
        The problems and the number of counted rows, or None if `datasets` isn't installed.
    """
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        return None
    problems: list[str] = []
    n_rows = 0
    with TemporaryDirectory(prefix="loaded-") as cache:
        for config, splits in rows.items():
            wanted = {split: n for split, n in splits.items() if n}
            if not wanted:
                continue
            try:
                found = _loaded(datasets, folder, config, wanted, cache)
            except (datasets.exceptions.DatasetsError, OSError, ValueError, TypeError) as error:
                problems.append(f"{config}: {type(error).__name__}: {error}".splitlines()[0])
                continue
            problems += found
            n_rows += sum(wanted.values())
    return problems, n_rows


def _loaded(
    datasets: Any, folder: Path, config: str, wanted: Mapping[str, int], cache: str
) -> list[str]:
    features = datasets.Features.from_arrow_schema(layout.schema_of(config))
    shown = datasets.utils.logging.is_progress_bar_enabled()
    datasets.utils.logging.disable_progress_bar()
    try:
        # What `load_dataset` does, whole and streaming, with the card read once.
        builder = datasets.load_dataset_builder(str(folder), config, cache_dir=cache)
        builder.download_and_prepare()
        whole, streams = builder.as_dataset(), builder.as_streaming_dataset()
    finally:
        if shown:
            datasets.utils.logging.enable_progress_bar()
    if set(whole) != set(wanted):
        return [f"{config}: has the splits {sorted(whole)}, and not {sorted(wanted)}"]
    problems: list[str] = []
    for split, n in wanted.items():
        rows, stream = whole[split], list(_ends(streams[split]))
        if rows.features != features or streams[split].features != features:
            problems.append(f"{config}, {split}: its columns are not those that were written")
        if len(rows) != n:
            problems.append(f"{config}, {split}: {len(rows)} rows, and not {n}")
        elif [rows[0], rows[n - 1]] != stream:
            problems.append(f"{config}, {split}: as a stream its first or last row is another")
    return problems


def _ends(stream: Any) -> list[Any]:
    """Return the first and the last row of a stream."""
    first = last = None
    for row in stream:
        first = row if first is None else first
        last = row
    return [first, last]
