"""Rules that look at the prompt against files that were rebuilt: who says that an answer would fail?

    python benchmarks/trials.py SESSIONS REPOSITORY

At recorded edits and reads that worked, plausible wrong answers are made by rule: a text as it stood
before the last change of the file, another file of the same name, a file that is spelled slightly
otherwise, the edit once more after it was made, a file that nobody has read. Beside them stand the
recorded actions themselves. Each is judged by the prompt (`feasibility`) and by running it.
"""

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replay_pipeline.actions import canonical_action
from replay_pipeline.ingesters import ClaudeCodeIngester
from replay_pipeline.judge.feasibility import PromptState
from replay_pipeline.settings import Settings
from replay_pipeline.stages.work.workspaces import Workspaces, ids_of
from replay_pipeline.types import Message
from replay_pipeline.workspaces.logs import LoggedCall
from replay_pipeline.workspaces.verdicts import Judge, StatePlace, TriedCall


def message(name: str, arguments: dict[str, Any]) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": "c", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def wrong_answers(
    step: LoggedCall, earlier: dict[str, list[LoggedCall]]
) -> Iterator[tuple[str, TriedCall]]:
    """The recorded action, and answers that are wrong here."""
    arguments, path = step.arguments, str(step.arguments.get("file_path"))
    yield "as recorded", TriedCall(step.name, arguments)
    folder, _, name = path.rpartition("/")
    yield (
        "file in another folder",
        TriedCall(step.name, {**arguments, "file_path": f"{folder.rpartition('/')[0]}/{name}"}),
    )
    stem, dot, end = name.rpartition(".")
    misspelled = f"{folder}/{stem}s{dot}{end}"
    yield "file slightly misspelled", TriedCall(step.name, {**arguments, "file_path": misspelled})
    for before in earlier[path][-1:]:
        old, new = before.arguments.get("old_string"), before.arguments.get("new_string")
        if isinstance(old, str) and isinstance(new, str) and old and old not in new:
            stale = {"file_path": path, "old_string": old, "new_string": f"{new}\n"}
            yield "text as before the last edit", TriedCall("Edit", stale)
            yield "edit already applied", TriedCall("Edit", dict(before.arguments))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sessions", type=Path, nargs="?")
    parser.add_argument("repository", type=Path, nargs="?")
    options = parser.parse_args()
    if options.repository is None:
        print("left out: name SESSIONS and the REPOSITORY that they worked in")
        return
    prompts = {s["state_id"]: s for s in ClaudeCodeIngester(redact=False).ingest(options.sessions)}
    work = Workspaces(Settings(), sources=[options.sessions], repositories=[options.repository])
    judge = Judge("files")
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for log, history in work.histories():
        ids = ids_of(log)
        earlier: dict[str, list[LoggedCall]] = defaultdict(list)
        for order, step in enumerate(log.steps):
            state = prompts.get(ids[step.decision])
            if state is not None and step.name in {"Read", "Edit"} and not step.is_error:
                history.enter(order, step, is_own_used=True)
                place = StatePlace(history, step)
                for kind, call in wrong_answers(step, earlier):
                    action = canonical_action(
                        message(call.name, dict(call.arguments)), cwd=state.get("cwd")
                    )
                    prompt = PromptState(state["messages"], None, cwd=state.get("cwd"))
                    rule = "no" if action.is_valid and prompt.obstacle(action) else "yes"
                    table[kind][f"{rule}/{judge.judge(place, [call]).status}"] += 1
                if step.name == "Edit":
                    earlier[str(step.arguments.get("file_path"))].append(step)
            history.enter(order, step)
            history.take(step)
    print(
        "| answer | n | fails when run | of those that the rules let pass, fail | of those they stop, work |"
    )
    print("|---|---|---|---|---|")
    for kind, found in table.items():
        n = sum(found.values())
        fails = found["yes/fails"] + found["no/fails"]
        passed = found["yes/fails"] + found["yes/works"]
        stopped = found["no/fails"] + found["no/works"]
        print(
            f"| {kind} | {n} | {fails} | {found['yes/fails']} of {passed} | "
            f"{found['no/works']} of {stopped} |"
        )


if __name__ == "__main__":
    main()
