"""Settings files of data roots that a test, a benchmark or a dry run makes for itself."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replay_pipeline.types import TeacherSpec


def write_settings(root: Path, **sections: Mapping[str, Any]) -> Path:
    """Write the `settings.toml` of a data root, which is made if it is not there.

    Teachers are asked at every step, unless `replay` says otherwise: most of what is told of the
    sample here was told of all of its states.

    Every consensus against the agent makes a pair there, unless `pairs` says otherwise: the answers
    are made up, and what real models' answers have shown says little of them.

    Nothing is checked before the file is read again: a test may want a setting that is wrong.

    Args:
        root: folder of the data root.
        sections: a keyword for each section of `Settings`, with its fields; teachers may be
            `TeacherSpec`s, such as those of `TeacherServer.teachers`.

    Returns:
        The file.
    """
    root.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    defaults = {"pairs": {"min_p_better": 0}, "replay": {"ask_at": "steps"}}
    given = {name: {**defaults.pop(name, {}), **fields} for name, fields in sections.items()}
    # First, so that what a test writes at the end belongs to its own last section.
    sections = {**defaults, **given}
    for name, fields in sections.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {_toml(value)}" for key, value in fields.items()]
    path = root / "settings.toml"
    path.write_text("\n".join([*lines, ""]), "utf-8")
    return path


def _toml(value: Any) -> str:
    match value:
        case TeacherSpec():
            return _toml(value.model_dump(exclude_unset=True))
        case Mapping():
            return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(_toml, value)) + "]"
        case None:  # which TOML has not; an empty `api_key_env` is no key either
            return '""'
        case _:
            return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
