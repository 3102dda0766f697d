"""What a data root says of itself without a look at a table: its batches, receipts and ledger.

Apart from everything that reads tables or asks somebody, so that who only looks waits for no import
of those.
"""

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from replay_pipeline.errors import ConfigError
from replay_pipeline.replay import has_ledger, ledger_status
from replay_pipeline.settings import Settings
from replay_pipeline.stages.receipts import Receipts
from replay_pipeline.stages.summary import OPEN_WORK, is_play, open_work
from replay_pipeline.storage.garbage_collection import without_collector
from replay_pipeline.storage.permissions import tighten_root
from replay_pipeline.storage.root_index import FILE, RootIndex
from replay_pipeline.storage.store import check_reachable, names_of_json

_TOLD = {
    "ingest": ("n_states", "fidelity"),
    "replay": OPEN_WORK,
    "pairs": ("n_pairs",),
    "normalize": ("n_kept",),
}
"""What is told of each stage of a batch."""

_FIGURE = {"ingest": "n_states", "replay": "n_answers", "pairs": "n_pairs", "normalize": "n_kept"}
"""What of it stands in the table of batches."""


class Overview:
    """The batches of a data root, what was done for them, and what it cost.

    Args:
        settings: everything the stages are told.

    Raises:
        StorageError: the data root is on an object store that cannot be reached.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        check_reachable(settings.data_dir)
        tighten_root(settings.data_dir)
        self.index = RootIndex(settings.data_dir, self._index_file())
        self.receipts = Receipts(settings.data_dir, self.index)
        self._keys: list[str] | None = None

    def _index_file(self) -> Path | None:
        """Tell where the index of the root lies; `None` if this machine has no folder for it."""
        if isinstance(self.settings.data_dir, Path):
            return self.settings.data_dir / FILE
        with suppress(ConfigError):
            name = f"index-{hash_of([str(self.settings.data_dir)])[:8]}.sqlite"
            return self.settings.local_dir() / name
        return None

    def batches(self) -> list[str]:
        """Keys of all batches that have a manifest, in order.

        They are listed once; `find_batches` looks again, and so does a new `Pipeline`.
        """
        if self._keys is None:
            self._keys = names_of_json(self.settings.data_dir / "batches")
        return self._keys

    @without_collector()
    def status(self) -> dict[str, Any]:
        """Tell what is done for each batch, what it cost, and what the ledger holds."""
        done = {stage: self.receipts.reports(stage, names=names) for stage, names in _TOLD.items()}
        batches: dict[str, dict[str, Any]] = {}
        for key in self.batches():
            found = {stage: done[stage][key] for stage in _TOLD if key in done[stage]}
            batches[key] = {
                # Answers that were made up are no answers.
                ("rehearsal" if stage == "replay" and is_play(report) else stage): report.get(
                    _FIGURE[stage]
                )
                for stage, report in found.items()
            }
        url = self.settings.ledger_url()
        ledger = {"ledger": "none yet", "spent_usd": 0.0, "held_usd": 0.0, "unknown_usd": 0.0,
                  "calls": {}}  # fmt: skip
        if has_ledger(url):
            ledger = ledger_status(url).to_json()
        return {
            "batches": batches,
            "teachers": [t.name for t in self.settings.teachers()],
            "played": self.settings.played,
            "ledger": ledger,
            "other_ledgers_usd": self._other_ledgers_usd(),
            "dataset": self.receipts.reports("publish").get("all"),
            "open": open_work(
                list(done["replay"].values()),
                n_teachers=self.n_teachers(),
                n_states_waiting=sum(
                    done["ingest"][key].get("n_states") or 0
                    for key in done["ingest"].keys() - done["replay"].keys()
                ),
            )
            | {"max_total_usd": self.settings.replay.max_total_usd},
            "rehearsed": [
                key for key in self.batches() if done["replay"].get(key, {}).get("n_rehearsed")
            ],
            "fidelity": {
                key: done["ingest"][key].get("fidelity")
                for key in self.batches()
                if key in done["ingest"]
            },
        }

    def n_teachers(self) -> int:
        """Return how many teachers there are to ask; those of a rehearsal are none."""
        is_play = self.settings.played == "rehearsal"
        return len(self.settings.replay.teachers if is_play else self.settings.teachers())

    def _other_ledgers_usd(self) -> dict[str, float]:
        """Tell what the ledgers of other teachers hold, by the way in which those are chosen."""
        if self.settings.replay.ledger is not None:
            return {}
        found = {}
        for choice in ("openrouter", "sample", "rehearsal"):
            played = {f"{name}_teachers": name == choice for name in ("sample", "rehearsal")}
            changed = self.settings.replay.model_copy(update=played)
            other = self.settings.model_copy(update={"replay": changed}).ledger_url()
            if other != self.settings.ledger_url() and has_ledger(other):
                found[choice] = ledger_status(other).spent_usd
        return found


def hash_of(parts: Iterable[str]) -> str:
    """Hash texts in their order."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()
