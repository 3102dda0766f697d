"""The settings that decide how states are shown to teachers and in datasets."""

from typing import Any

from replay_pipeline.ingesters.harness.harness import HarnessStore
from replay_pipeline.settings import Settings


def harnesses_of(settings: Settings) -> HarnessStore | None:
    """Return the recorded harnesses, or `None` if the settings ask for the neutral prompt."""
    return None if settings.ingest.harness == "neutral" else HarnessStore(settings.data_dir)


def shown_below(settings: Settings) -> dict[str, Any]:
    """Return the window and harnesses, which decide how states are shown.

    A harness counts by its contents. So `ingest.harness` changes nothing if no harness was recorded.

    Raises:
        ConfigError: a harness cannot be read.
        StorageError: the data root cannot be reached.
    """
    told = [
        f"{each.agent} {each.version} ({each.sha[:8]})" for each in harnesses_of(settings) or ()
    ]
    return {"ingest.window": settings.ingest.window, "ingest.harness": told or None}
