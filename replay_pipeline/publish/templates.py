"""Check whether a chat template can show calls. Some templates silently drop them."""

import json
from pathlib import Path
from typing import Any

from replay_pipeline.errors import ConfigError

_ASK = {"role": "user", "content": "Look."}
_CALL_NAME = "look_for_it"


def has_place_for_calls(folder: Path) -> bool | None:
    """Return whether a model's chat template writes calls, or None without a template.

    With a template that doesn't, such as SmolLM2's, two sides that differ only in their calls
    become the same tokens, and a trainer learns nothing from them.

    Args:
        folder: folder of the model, with `chat_template.jinja` or `tokenizer_config.json`.

    Raises:
        ConfigError: the template cannot be read or rendered.
    """
    template = _template_of(folder)
    if template is None:
        return None
    import jinja2  # noqa: PLC0415 - only who names a model needs it
    import jinja2.sandbox  # noqa: PLC0415

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    call = {"type": "function", "function": {"name": _CALL_NAME, "arguments": {"at": "x"}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [{"id": "call00000", **call}]}
    try:
        text = environment.from_string(template).render(
            messages=[_ASK, answer],
            tools=None,
            bos_token="",
            eos_token="",
            raise_exception=_refuse,
            strftime_now=lambda _form: "",
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder}: its chat template cannot be used ({error})") from error
    return _CALL_NAME in text


def _template_of(folder: Path) -> str | None:
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text("utf-8")
    if not (file := folder / "tokenizer_config.json").is_file():
        return None
    try:
        found: Any = json.loads(file.read_text("utf-8")).get("chat_template")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{file}: not a tokenizer_config.json") from error
    if isinstance(found, list):
        by_name = {one.get("name"): one.get("template") for one in found}
        found = by_name.get("tool_use") or by_name.get("default")
    return found if isinstance(found, str) else None


def _refuse(message: str) -> None:
    raise ValueError(message)
