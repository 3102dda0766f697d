"""ADP, the agent data protocol: trajectories of actions and observations, of any agent."""

from collections.abc import Iterator
from typing import Any

from replay_pipeline.ingesters.agents.base import Conversation, TrajectoryReader
from replay_pipeline.ingesters.base import Result
from replay_pipeline.ingesters.json_lines import arguments_text, as_dict, as_list, text_or_none

_SHELLS = frozenset({"bash", "sh", "shell", "zsh"})
_ENDS = frozenset({"finish", "submit", "stop", "terminate", "send_msg_to_user"})
"""What an agent calls to hand over to its user, who may answer."""
_KEYS = (b'"class_"', b'"content"')


class AgentDataProtocol(TrajectoryReader):
    """Reads standardized trajectories: a list of them, or one a line.

    What an agent does up to the next observation is one decision. Code is a call of the tool that
    has the name of its language.
    """

    name = "agent_data_protocol"
    rank = 2

    def sniff(self, head: bytes) -> bool:
        """Return whether `head` has the beginning of a trajectory."""
        has_parts = any(kind in head for kind in (b'_observation"', b'_action"'))
        return has_parts and all(key in head for key in _KEYS)

    def talks(self, row: dict[str, Any], name: str) -> Iterator[Conversation]:
        """Yield the conversation of a trajectory."""
        talk = Conversation(text_or_none(row.get("id")) or name, self.name)
        parts = as_list(row.get("content"))
        for part in map(as_dict, parts):
            _take(talk, part)
        if parts:
            yield talk


def _take(talk: Conversation, part: dict[str, Any]) -> None:
    kind = text_or_none(part.get("class_")) or ""
    call_id = text_or_none(part.get("tool_call_id"))
    if kind.endswith("_action"):
        turn = talk.assistant()
        turn.thinking += filter(None, [text_or_none(part.get("reasoning_content"))])
        turn.texts += filter(None, [text_or_none(part.get("description"))])
        if kind == "api_action":
            name = text_or_none(part.get("function")) or ""
            talk.call(turn, call_id, name, part.get("kwargs"))
        elif kind == "code_action":
            name = (text_or_none(part.get("language")) or "code").lower()
            argument = "command" if name in _SHELLS else "code"
            talk.call(turn, call_id, name, {argument: part.get("content")})
        else:
            turn.texts += filter(None, [text_or_none(part.get("content"))])
        return
    if not kind.endswith("_observation"):
        return
    names = ("content", "axtree", "html", "url")
    shown = next((part[name] for name in names if part.get(name)), "")
    text = shown if isinstance(shown, str) else arguments_text(shown)
    if part.get("image_observation") or kind == "image_observation":
        text = f"{text}\n[image]".strip()
    by_user = part.get("source") == "user" and not talk.calling.isdisjoint(_ENDS)
    is_answer = part.get("source") != "agent" and not by_user and (talk.calling or call_id)
    if is_answer and talk.answer(call_id, Result(text)):
        talk.close()
    elif text:
        talk.user(text, kind="user" if part.get("source") == "user" else "meta")
