"""Publish the twins of `repositories.py` as a preference dataset, by the product's own code.

    python recipes/real_model/twins.py build/twins

Train on it with nothing but what ships: `replay-train --set model=FOLDER --set
dataset=build/twins --set output=build/twins-model`. New repositories, and families that are never
trained on, are the test split; every state is a conversation of its own, as no agent meets both twins
in one session.
"""

import argparse
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from repositories import Repository, Split, repositories

from replay_pipeline.actions.canonical import canonical_action
from replay_pipeline.publish.publisher import publish
from replay_pipeline.storage.pair_rows import table_with_prompts
from replay_pipeline.types import NormalizedDPOPair

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": "string"}},
                "required": [argument],
            },
        },
    }
    for name, description, argument in (
        ("Read", "Read a file.", "file_path"),
        ("Bash", "Run a command.", "command"),
    )
]
LABELS = ("right", "coin")


def twin_pairs(
    tested: Iterable[Repository], *, labels: str = "right", seed: int = 0
) -> Iterator[NormalizedDPOPair]:
    """Yield both states of every repository, the right action preferred, or one by a coin."""
    draw = random.Random(seed)
    for repository in tested:
        for wanted in (0, 1):
            chosen = wanted if labels == "right" else draw.randrange(2)
            good, bad = repository.calls[chosen], repository.calls[1 - chosen]
            name = f"{repository.split}-{repository.number}-{wanted}"
            yield {
                "state_id": name,
                "session_id": name,
                "conversation": name,
                "state_messages": repository.prompt(wanted),
                "tools": TOOLS,
                "chosen": canonical_action(good).render(),
                "rejected": canonical_action(bad).render(),
                "chosen_messages": [good],
                "rejected_messages": [bad],
                "n_teachers_agreeing": 2,
                "n_teachers_asked": 2,
                "n_teachers_valid": 2,
                "agreement_level": "exact",
                "margin": 1,
                "source": "consensus",
                "rejected_source": "recorded",
                "weight": 1.0,
            }


def write(
    folder: Path,
    *,
    labels: str = "right",
    seed: int = 0,
    tested: Sequence[Split] = ("new_repositories",),
) -> None:
    """Publish what is trained on, and what is tested, whose labels are always right."""
    every = repositories(seed=seed)
    parts = (
        ("train", 0.0, twin_pairs([o for o in every if o.split == "train"], labels=labels)),
        ("test", 1.0, twin_pairs([o for o in every if o.split in tested])),
    )
    for key, fraction, pairs in parts:
        batch = (key, table_with_prompts(pairs))
        publish([batch], folder=folder, test_fraction=fraction, lengths=())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--labels", choices=LABELS, default="right")
    parser.add_argument("--seed", type=int, default=0, help="of names, their order, and coins")
    parser.add_argument(
        "--tested", nargs="+", choices=("new_repositories", "new_families"),
        default=["new_repositories"],
    )  # fmt: skip
    given = parser.parse_args()
    write(given.folder, labels=given.labels, seed=given.seed, tested=given.tested)


if __name__ == "__main__":
    main()
