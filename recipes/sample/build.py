"""Write the bundled sample: python recipes/sample/build.py [--out FOLDER]."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scenarios import (
    csvmend_blanks,
    csvmend_pipes,
    csvmend_quotes,
    csvmend_ties,
    kiln_csv,
    kiln_history,
    kiln_ramp,
    kiln_types,
    kiln_units,
    stacks_deploy,
    stacks_fines,
    stacks_holds,
    stacks_routes,
    stacks_timeout,
    stacks_twice,
    tideline_days,
    tideline_json,
    tideline_ports,
    tideline_release,
    tideline_summer,
    tideline_unused,
)
from story import Story

HERE = Path(__file__).parent
SCENARIOS = (
    tideline_summer,
    tideline_unused,
    tideline_json,
    tideline_days,
    csvmend_blanks,
    stacks_routes,
    stacks_fines,
    csvmend_quotes,
    kiln_types,
    stacks_deploy,
    kiln_ramp,
    kiln_csv,
    csvmend_pipes,
    stacks_twice,
    csvmend_ties,
    stacks_holds,
    kiln_units,
    stacks_timeout,
    tideline_ports,
    kiln_history,
    tideline_release,
)


def build(out_dir: Path, expected_path: Path) -> list[Story]:
    """Write the sessions, the answers and the README to `out_dir`, the intentions beside it."""
    stories = [scenario.tell() for scenario in SCENARIOS]
    for story in stories:
        story.log.write(out_dir / "sessions")
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
    counts = {
        outcome: sum(value["outcome"] == outcome for value in values)
        for outcome in ("pair", "agrees_with_student", "no_consensus")
    }
    n_with_agents = sum(len(story.session_ids) for story in stories)
    return template.format(
        table="\n".join(rows),
        n_sessions=len(stories),
        n_agents=n_with_agents - len(stories),
        n_with_agents=n_with_agents,
        n_states=len(values),
        **counts,
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
    print(f"{len(stories)} sessions, {n_states} states -> {options.out}")


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
