"""Write the bundled sample: python recipes/sample/build.py [--out FOLDER]."""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scenarios import (
    csvmend_pipes,
    csvmend_quotes,
    kiln_ramp,
    kiln_units,
    odd_jobs,
    stacks_deploy,
    stacks_fines,
    stacks_holds,
    tideline_json,
    tideline_summer,
)
from story import Story

HERE = Path(__file__).parent
SCENARIOS = (
    tideline_summer,
    tideline_json,
    csvmend_quotes,
    stacks_fines,
    stacks_deploy,
    kiln_ramp,
    csvmend_pipes,
    stacks_holds,
    kiln_units,
)

OUTCOMES = {
    "pair": "at least two teachers agree on something that the student did not do",
    "agrees_with_student": "they agree with the student (`agreement`)",
    "no_consensus": "they do not agree",
    "contested": "two teachers stand against two answers like the student's",
    "deferred": "what they agree on the student does a step or two later",
    "doubtful": "two of three end with a text where the student makes sure",
    "infeasible": "they agree on a change to something that nobody had shown",
    "refusal": "they refuse in the same words",
    "too_few_answers": "only one answer can be used",
    "invalid_action": "the student's own call cannot be used",
}
"""What can come of a state, in words."""


def build(out_dir: Path, expected_path: Path) -> list[Story]:
    """Write the sessions, the answers and the README to `out_dir`, the intentions beside it."""
    stories = [*(scenario.tell() for scenario in SCENARIOS), *odd_jobs.stories()]
    for story in stories:
        for log in (*story.left, story.log):
            log.write(out_dir / "sessions")
    answers = [answer for story in stories for answer in story.answers]
    expected = {key: value for story in stories for key, value in story.expected.items()}
    _write(out_dir / "answers.jsonl", "".join(f"{_dumps(answer)}\n" for answer in answers))
    _write(out_dir / "README.md", readme(stories))
    lines = ",\n".join(f"{_dumps(key)}: {_dumps(value)}" for key, value in expected.items())
    _write(expected_path, f"{{\n{lines}\n}}\n")
    return stories


def readme(stories: Sequence[Story]) -> str:
    """Return the README of the sample, with a line for each session."""
    template = (HERE / "sample-README.md").read_text(encoding="utf-8")
    rows = [
        "| session | project | version | states | pairs | shows |",
        "|---|---|---|---:|---:|---|",
    ]
    for story in stories:
        n_pairs = sum(value["outcome"] == "pair" for value in story.expected.values())
        project = Path(story.cwd).name
        rows.append(
            f"| {story.name} | {project} | {story.version} | {len(story.expected)} | {n_pairs}"
            f" | {story.shows} |"
        )
    values = [value for story in stories for value in story.expected.values()]
    counts = Counter(value["outcome"] for value in values)
    logs = [log.session_id for story in stories for log in (*story.left, story.log)]
    sessions = {each for story in stories for each in story.session_ids}
    return template.format(
        table="\n".join(rows),
        n_conversations=len(stories),
        n_logs=len(logs),
        n_agents=len(sessions - set(logs)),
        n_sessions=len(sessions),
        n_states=len(values),
        table_of_outcomes="\n".join(
            f"| `{name}` | {counts[name]} | {about} |" for name, about in OUTCOMES.items()
        ),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Build the sample and say what was written."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = HERE.parents[1] / "replay_pipeline" / "testing" / "sample"
    parser.add_argument("--out", type=Path, default=default, help="folder of the sample")
    parser.add_argument("--expected", type=Path, default=HERE / "expected.json")
    options = parser.parse_args(argv)
    stories = build(options.out, options.expected)
    n_states = sum(len(story.expected) for story in stories)
    n_logs = sum(1 + len(story.left) for story in stories)
    print(f"{n_logs} session logs, {n_states} states -> {options.out}")


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
