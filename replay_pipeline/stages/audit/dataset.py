"""Checks of the published dataset folder, read with the same tools as a user of the dataset."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from replay_pipeline.errors import CheckFailedError
from replay_pipeline.publish import in_words, layout
from replay_pipeline.publish.batch_facts import rows_by_split
from replay_pipeline.publish.blind import WARN_ABOVE
from replay_pipeline.publish.loading import problems_of_loading
from replay_pipeline.publish.version import read_manifests
from replay_pipeline.stages.audit import AuditResult
from replay_pipeline.stages.audit.held_out import shared_conversations, shared_messages
from replay_pipeline.storage.store import Place, copy_files, files_below


def loaded(folder: Place) -> AuditResult:
    """Does `datasets.load_dataset` open every config and split, as a whole and as a stream?"""
    with TemporaryDirectory(prefix="published-") as name:
        here = folder if isinstance(folder, Path) else Path(name)
        if here is not folder:
            copy_files(folder, here, files_below(folder))
        found = problems_of_loading(here, rows_by_split(read_manifests(here)))
    if found is None:
        return AuditResult(
            facts={"looked_at": "nothing: pip install 'replay-pipeline[publish]'"}, judged=0
        )
    problems, n_rows = found
    return AuditResult(
        problems=problems,
        what_to_do="Nobody could use it. If a file was changed by hand, publish again; if not, see "
        "which version of `datasets` is installed: 5 is what this was tried with.",
        facts={"rows": n_rows},
        judged=n_rows,
    )


BLOCKING: Mapping[str, Callable[[Place], AuditResult]] = {
    "splits_share_no_conversation": shared_conversations,
    "splits_share_no_prompt": shared_messages,
    "dataset_loads": loaded,
}
"""The checks that a new dataset must pass before it replaces the previous one, by name."""


def refuse_unfit_dataset(folder: Place) -> dict[str, str]:
    """Return the verdict of each blocking check, in words.

    Raises:
        CheckFailedError: a check fails.
    """
    told: dict[str, str] = {}
    for name, look in BLOCKING.items():
        verdict = look(folder)
        if not verdict.holds:
            raise CheckFailedError(f"nothing was published. {name}: {verdict.message()}")
        told[name] = verdict.message() or f"holds ({verdict.judged} looked at)"
    return told


def prompts_decide(folder: Place) -> AuditResult:
    """Check that it takes the prompt to tell which side of a pair was chosen."""
    path = folder / layout.FACTS
    facts = json.loads(path.read_text("utf-8")) if path.exists() else {}
    blind = facts.get("blind_control") or {}
    shown = {name: n for name, n in blind.items() if name.startswith(("ngrams", "length", "tools"))}
    return AuditResult(
        problems=[in_words(blind)] if max(shown.values(), default=0.0) > WARN_ABOVE else [],
        what_to_do="Look at the pairs for words, lengths or tools that only one side has, and "
        "judge a trained model by its accuracy with the true prompt minus that with a blank one.",
        facts=blind,
        is_warning=True,
        judged=blind.get("n_pairs", len(blind)),
    )
