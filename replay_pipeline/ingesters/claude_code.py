"""Claude Code sessions: a log's rows become a tree of turns.

The log is a graph of rows, not a chat. One API message can be several rows with the same
`message.id`, not always next to each other. A tool result belongs to the message with its
`tool_use_id`, whatever row it names as its parent. Rows without a message only continue the chain.
A compaction starts a new root. With rows grouped in this way, the path from the root to a turn is
what the model saw.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from replay_pipeline.ingesters import attachments, rows
from replay_pipeline.ingesters.base import (
    LACKS,
    MEDIA,
    ReadCounts,
    RecordedCall,
    RecordedUsage,
    Result,
    SessionLog,
    Turn,
    path_to,
)
from replay_pipeline.ingesters.json_lines import LONG_BYTES, lines_in
from replay_pipeline.ingesters.rows import Block, Row, RowUsage
from replay_pipeline.ingesters.sent import (
    REQUEST_ROWS,
    SentRequests,
    SentTurns,
    join_siblings,
    read_sent,
    shape_of_snapshot,
)

logger = logging.getLogger(__name__)

_NO_MODEL = "<synthetic>"
"""The model of what the client says in its place, as when a session is taken up again: seen, and no decision."""
_HOUSEKEEPING_AGENTS = ("agent-acompact", "agent-aprompt_suggestion", "agent-aside_question")
_COMMAND = re.compile(
    r"\s*<(?:command-name|command-message|local-command-|bash-input|bash-stdout|bash-stderr)"
)
_UUID_KEY = b'"uuid"'
_UUID_VALUE = re.compile(rb'\s*:\s*"([^"]+)"')
_BOOKKEEPING = frozenset({
    "agent-color", "agent-name", "agent-setting", "ai-title", "artifact-autoreact-ledger",
    "artifact-comment-monitor", "atis-latch", "attribution-snapshot", "bridge-session",
    "cost-state", "custom-title", "file-history-delta",
    "file-history-snapshot", "frame-link", "last-prompt", "marble-origami-commit",
    "marble-origami-snapshot", "mode", "permission-mode", "pr-link", "relocated",
    "speculation-accept", "summary", "tag", "task-summary", "tools-used", "turn_end",
    "worktree-state",
})  # fmt: skip
"""Rows without a `uuid` that nobody was shown."""
_ROWS_APART = frozenset({"content-replacement", "queue-operation", *REQUEST_ROWS})
_ROW_TYPES = frozenset({"user", "assistant", "system", "attachment", "progress"})


class LogTree:
    """Turns of one chain of rows, built in a single pass."""

    def __init__(
        self, path: Path | None, counts: ReadCounts, agent: str = "", end: int | None = None
    ) -> None:
        self.turns: list[Turn] = []
        self.path = path
        self.end = end
        self.counts = counts
        self.agent = agent
        self.segment = 0
        self._texts: dict[str | None, str | None] = {}
        self.by_row: dict[str, Turn | None] = {}
        self.by_message: dict[str, Turn] = {}
        self.by_call: dict[str, list[tuple[Turn, RecordedCall]]] = {}
        """Calls by the id that the log has for them, which may be that of several."""
        self.signs: dict[Turn, _Signs] = {}
        self.tips: dict[bool, Turn | None] = {False: None, True: None}
        self.replaced: dict[str, str] = {}
        """What the model was shown instead of a result, by the id of its call."""
        self.agents: dict[str, LogTree] = {}
        self.preserved: dict[str, _Preserved] = {}
        self.last_preserved: _Preserved | None = None
        self.waiting: dict[str, list[tuple[int, Row, Turn | None]]] = {}
        self.later_uuids: set[bytes] | None = None
        self.origins: set[str] = set()
        """Sessions that rows name: a fork names its parent, a copied row the session it is of."""
        self.follows: set[str] = set()
        self.queue = _Queue()
        self.entrypoint: str | None = None
        self.is_long = False
        """Whether the file is one of which little is held in memory."""
        self.snapshots: list[dict[str, Any]] = []
        """System prompts and tools, as the client logged them."""
        self.n_snapshots: dict[Turn, int] = {}
        """How many of these each decision has seen logged."""
        self.titles: list[str | None] = [None, None]
        """What its user called the session, and what its client did."""
        self.client_usd: list[dict[str, float]] = [{}]
        """Dollars by model as the client counted them last, for each run that began at 0."""
        self.summaries: list[tuple[str, str]] = []
        """Summaries, each with the row that it leads up to."""

    def add(self, offset: int, row: Row) -> None:
        """Take one row in; it is counted as used or skipped exactly once."""
        uuid = row.uuid
        if uuid is None or row.type in _ROWS_APART:
            self._take_apart(offset, row)
            return
        if row.session_id:
            self.origins.add(row.session_id)
        if row.forked_from and isinstance(
            origin := rows.loose(row.forked_from).get("sessionId"), str
        ):
            self.origins.add(origin)
        self.entrypoint = self.entrypoint or row.entrypoint
        if self.is_copy(offset, row):
            # A resumed session writes its history into the file once more; the first copy counts.
            self.counts.skipped["duplicate_row"] += 1
            return
        parent_uuid = row.parent_uuid
        is_side = bool(row.is_sidechain)
        if parent_uuid is None or row.subtype == "compact_boundary":
            parent = None  # what follows a compaction is below nothing
        elif parent_uuid in self.preserved:
            parent = self._below_preserved(parent_uuid, row)
        elif parent_uuid in self.by_row:
            parent = self.by_row[parent_uuid]
        elif self._comes_later(parent_uuid, offset):
            # Parallel writers: a child may be logged before its parent. It waits, with the tip as
            # it is now, in case the parent turns out to be one that was announced but never came.
            self.waiting.setdefault(parent_uuid, []).append((offset, row, self.tips[is_side]))
            return
        else:
            # A parent that no row of the file is: rows of another process, or of a lost tail. The
            # last turn of the same chain stands in for it, or else the prefix would end here.
            self.follows.add(parent_uuid)
            parent = self._instead_of_phantom(self.tips[is_side])
        self.place(offset, row, parent)
        if self.waiting:
            self._wake(uuid)

    def _take_apart(self, offset: int, row: Row) -> None:
        """Take in a row that stands outside the graph."""
        if row.type == "content-replacement":
            self._replace(row)
        elif row.type == "queue-operation":
            self._queue(offset, row)
        elif row.type in REQUEST_ROWS:
            self.counts.rows_used += 1
        elif row.type in _BOOKKEEPING:
            self.counts.skipped["bookkeeping"] += 1
            self._name(row)
            if row.model_usage:
                self.count_usd({name: use.cost_usd for name, use in row.model_usage.items()})
        else:
            self._unknown(f"row_{str(row.type)[:40]}", row)

    def count_usd(self, usd: dict[str, float]) -> None:
        """Take in the client's running count, which may begin again when a session is resumed."""
        if sum(usd.values()) < sum(self.client_usd[-1].values()):
            self.client_usd.append({})
        self.client_usd[-1] = usd

    def _name(self, row: Row) -> None:
        """Keep what the session is called: the last name of each kind, its user's before its client's."""
        if row.type == "summary" and row.summary:
            self.summaries.append((row.leaf_uuid or "", row.summary))
        elif row.type == "ai-title" and row.ai_title:
            self.titles[1] = row.ai_title
        elif row.type == "custom-title" and row.custom_title:
            self.titles[0] = row.custom_title

    def title(self) -> str | None:
        """Return what the log calls the session; summaries of other sessions may be in its file too."""
        own = [text for leaf, text in self.summaries if leaf in self.by_row]
        return self.titles[0] or self.titles[1] or (own[-1] if own else None)

    def finish(self) -> None:
        """Place the rows whose parent never came."""
        while self.waiting:
            uuid = next(iter(self.waiting))
            for offset, row, tip in self.waiting.pop(uuid):
                self._place_late(offset, row, self._instead_of_phantom(tip))
                self._wake(row.uuid or "")
        _thread_queued(self.turns)
        # What was taken from the queue, and no request followed that could have shown it.
        self.counts.skipped["bookkeeping"] += len(self.queue.taken)

    def _wake(self, uuid: str) -> None:
        ready = [uuid]  # a list and not a recursion: chains of waiting rows grow as long as files
        while ready:
            for offset, row, _ in self.waiting.pop(ready.pop(), ()):
                self._place_late(offset, row, self.by_row[row.parent_uuid or ""])
                ready.append(row.uuid or "")

    def _comes_later(self, uuid: str, offset: int) -> bool:
        """Return whether a row with this uuid may stand at or after `offset`."""
        if self.path is None:
            return False
        if self.later_uuids is None:
            # One pass over the rest of the file, at the first missing parent only: most files
            # have none, and asking per row would make reading quadratic.
            self.later_uuids = set()
            for line in lines_in(self.path, offset, self.end):
                self.later_uuids.update(_uuids_in(line))
        return uuid.encode("utf-8", "replace") in self.later_uuids

    def _instead_of_phantom(self, tip: Turn | None) -> Turn | None:
        self.counts.notes["phantom_parent"] += 1
        return tip

    def is_copy(self, offset: int, row: Row) -> bool:
        """Return whether a row was read before; one of other content gets a name of its own."""
        if row.uuid not in self.by_row:
            return False
        turn, message = self.by_row[row.uuid], row.message
        if turn is None or message is None or self._has(turn, message.content):
            return True
        row.uuid = f"{row.uuid}~{offset}"
        return False

    def _has(self, turn: Turn, content: str | list[Block] | None) -> bool:
        said = {*turn.texts, *turn.thinking, None, ""}
        if not isinstance(content, list):
            return content in said
        for block in content:
            same = self.by_call.get(block.id or block.tool_use_id or "", ())
            here = [call.id for owner, call in same if owner is turn]
            is_text = block.type in ("text", "thinking")
            if block.type == "tool_result":
                here = [call_id for call_id in here if call_id in turn.results]
            if not here and (block.text or block.thinking) not in (said if is_text else ()):
                return False
        return True

    def _place_late(self, offset: int, row: Row, parent: Turn | None) -> None:
        if self.is_copy(offset, row):
            self.counts.skipped["duplicate_row"] += 1
        else:
            self.place(offset, row, parent)

    def place(self, offset: int, row: Row, parent: Turn | None) -> None:
        """Take in a row below a turn."""
        # Rows that make no turn are aliases of the turn above them: a child of theirs hangs there.
        self.by_row[row.uuid or ""] = parent
        kind = row.type
        if kind == "assistant" and row.message is not None:
            self._assistant(offset, row, parent)
        elif kind == "user" and row.message is not None:
            self._user(offset, row, parent)
        elif kind == "system":
            self._system(offset, row, parent)
        elif kind == "attachment":
            self._attachment(offset, row, parent)
        elif kind == "progress":
            self._progress(offset, row)
        elif kind in _ROW_TYPES:
            self.counts.skipped["no_message"] += 1
        else:
            self._unknown(f"row_{str(kind)[:40]}", row)

    def _unknown(self, what: str, row: Row) -> None:
        """Count what this reader does not know, by name and by the version that wrote it."""
        version = f"_of_{row.version[:20]}" if row.version else ""
        self.counts.skipped[f"unknown_{what}{version}"] += 1

    def _turn(self, offset: int, row: Row, parent: Turn | None, kind: str) -> Turn:
        if parent is not None:
            agent, segment = parent.agent, parent.segment
        else:
            agent, segment = self.agent, self.segment
            # Older versions write subagents into the main file, as roots of their own.
            if row.is_sidechain and not agent:
                agent = row.agent_id or (row.uuid or "")[:8]
        turn = Turn(
            parent=parent,
            kind=kind,
            offset=offset,
            uuid=row.uuid or "",
            segment=segment,
            agent=agent,
            timestamp=row.timestamp,
            version=self._same(row.version),
            cwd=self._same(row.cwd),
            branch=self._same(row.git_branch),
        )
        self.turns.append(turn)
        self.tips[bool(row.is_sidechain)] = turn
        return turn

    def _same(self, text: str | None) -> str | None:
        """Return a text that many turns have as one object, which holds its memory once."""
        return self._texts.setdefault(text, text)

    def _assistant(self, offset: int, row: Row, parent: Turn | None) -> None:
        message = row.message
        assert message is not None
        # An error of the provider, written in the model's place: no model decided or was shown it.
        if row.is_api_error_message:
            self.counts.skipped["synthetic"] += 1
            return
        # One API message is a row per block, and results may stand between them: rows with one id
        # are one decision, wherever they name their parent, if nothing else tells them apart.
        key = message.id or row.uuid or ""
        turn = self.by_message.get(key)
        signs = (row.request_ref or row.request_id, row.api_block_index, message.usage)
        if turn is not None and self._is_other(turn, signs, row, parent):
            turn = None
            self.counts.notes["repeated_message_id"] += 1
        if turn is None:
            if self.queue.taken and not row.is_sidechain and message.model != _NO_MODEL:
                parent = self._say_queued(row, parent)
            turn = self.by_message[key] = self._turn(offset, row, parent, "assistant")
            turn.message_id = message.id
            turn.model = self._same(message.model)
            if message.model == _NO_MODEL:
                turn.flags |= {"copy"}
            turn.request = row.request_ref
            if self.snapshots:
                self.n_snapshots[turn] = len(self.snapshots)
        self.by_row[row.uuid or ""] = turn
        self.signs[turn] = signs
        self.tips[bool(row.is_sidechain)] = turn
        self.counts.rows_used += 1
        turn.stop_reason = message.stop_reason or turn.stop_reason
        usage = message.usage
        if usage is not None:
            n_output, lifetimes = usage.output_tokens or 0, usage.cache_creation
            searched = usage.server_tool_use
            # Each row repeats the usage as it was while streaming; the largest is the final one.
            if turn.usage is None or n_output > turn.usage.n_output:
                turn.usage = RecordedUsage(
                    usage.input_tokens or 0,
                    usage.cache_creation_input_tokens or 0,
                    usage.cache_read_input_tokens or 0,
                    n_output,
                    lifetimes.ephemeral_1h_input_tokens if lifetimes is not None else None,
                    (searched.web_search_requests if searched is not None else 0) or 0,
                    usage.speed,
                    usage.inference_geo or None,
                )
        if isinstance(message.content, str):
            turn.texts.append(message.content)
        else:
            for block in message.content or ():
                self._assistant_block(turn, block)

    def _is_other(self, turn: Turn, signs: "_Signs", row: Row, parent: Turn | None) -> bool:
        """Return whether a row belongs to another message than the one that has its id.

        An id is a hint: some servers give every message the same one. Rows of one message have the
        same request and the same prompt tokens, and their blocks are numbered in order.
        """
        if (told := _tell_apart(self.signs[turn], signs)) is not None:
            return told
        above = parent
        while above is not None and above is not turn and above.offset > turn.offset:
            if above.kind in ("user", "assistant"):
                return True
            above = above.parent
        content = row.message.content if row.message is not None else None
        named = [block for block in content or () if isinstance(block, Block) and block.id]
        return any(
            owner is turn and call.id in turn.results
            for block in named
            for owner, call in self.by_call.get(block.id or "", ())
        )

    def _call(self, turn: Turn, block: Block) -> None:
        named = block.id or f"{turn.uuid}-{len(turn.calls)}"
        same = self.by_call.setdefault(named, [])
        arguments, name = rows.json_text(block.input) or "{}", block.name or ""
        if any(t is turn and (c.name, c.arguments) == (name, arguments) for t, c in same):
            self.counts.notes["repeated_call"] += 1  # streamed and then logged whole
            return
        call = RecordedCall(f"{named}~{len(same)}" if same else named, name, arguments)
        turn.calls.append(call)
        same.append((turn, call))
        if self.is_long:
            call.pack()

    def _asked(self, named: str, parent: Turn | None) -> tuple[Turn, str] | None:
        """Return the call that a result answers: of several with its id the nearest above that waits."""
        found = self.by_call.get(named)
        if not found:
            return None
        if len(found) > 1:
            waiting = [(turn, call) for turn, call in found if call.id not in turn.results]
            above = set(path_to(parent))
            near = [each for each in waiting if each[0] in above]
            last = (near or waiting or found)[-1][0]
            found = [each for each in near or waiting or found if each[0] is last]
        turn, call = found[0]
        return turn, call.id

    def _assistant_block(self, turn: Turn, block: Block) -> None:
        kind = block.type
        if kind == "tool_use":
            self._call(turn, block)
        elif kind == "text":
            if block.text:
                turn.texts.append(block.text)
        elif kind == "thinking":
            if block.thinking:
                turn.thinking.append(block.thinking)
        elif kind == "redacted_thinking":
            turn.flags |= {"redacted_thinking"}
        elif kind == "server_tool_use":
            arguments = rows.json_text(block.input)
            turn.texts.append(f"[{block.name or 'server_tool'} {arguments}]")
        elif kind.endswith("_tool_result"):
            turn.texts.append(f"[{kind}]")
            turn.flags |= {f"{LACKS}{kind}"}
        else:
            self.counts.notes["unknown_block"] += 1

    def _user(self, offset: int, row: Row, parent: Turn | None) -> None:
        message = row.message
        assert message is not None
        uuid = row.uuid or ""
        content = message.content
        # Shown to the user alone; a summary is marked so too, though the model starts from it.
        if row.is_visible_in_transcript_only and not row.is_compact_summary:
            self.counts.skipped["transcript_only"] += 1
            return
        if isinstance(content, str):
            self.counts.rows_used += 1
            self.by_row[uuid] = self._user_turn(offset, row, parent, [content])
            return
        owner, texts, n_orphans = self._results(row, content or [], parent)
        if owner is not None:
            # The id of the call is the truth; the row's own parent is often the last block of the
            # message, or with parallel calls the result before it.
            parent = owner
            self.by_row[uuid] = owner
            self.tips[bool(row.is_sidechain)] = owner
        elif n_orphans and not texts:
            self.counts.skipped["orphan_result"] += 1
            return
        elif not texts:
            self.counts.skipped["empty"] += 1
            return
        self.counts.rows_used += 1
        if texts:
            self.by_row[uuid] = self._user_turn(offset, row, parent, texts)

    def _results(
        self, row: Row, blocks: list[Block], parent: Turn | None
    ) -> tuple[Turn | None, list[str], int]:
        owner: Turn | None = None
        texts: list[str] = []
        n_orphans = 0
        for block in blocks:
            if block.type == "tool_result":
                asked = self._asked(block.tool_use_id or "", parent)
                if asked is None:
                    n_orphans += 1
                    continue
                turn, call_id = asked
                owner = turn
                # A call that is answered twice (a resumed session) went on from the first answer.
                if call_id not in turn.results:
                    if isinstance(block.content, list):
                        kinds = {inner.type for inner in block.content}.intersection(MEDIA)
                        turn.flags |= {f"{LACKS}{kind}" for kind in kinds}
                    turn.results[call_id] = Result(
                        self.replaced.get(call_id) or rows.result_text(block.content),
                        bool(block.is_error),
                        row.tool_denial_kind,
                        row.user_feedback,
                    )
                    if self.is_long:
                        turn.results[call_id].pack()
            elif block.type == "text":
                texts.append(block.text or "")
            else:
                texts.append(f"[{block.type}]")
        if n_orphans:
            self.counts.notes["orphan_result"] += n_orphans
        return owner, texts, n_orphans

    def _user_turn(self, offset: int, row: Row, parent: Turn | None, texts: list[str]) -> Turn:
        turn = self._turn(offset, row, parent, _user_kind(row, texts[0]))
        turn.texts = texts
        turn.flags |= {f"{LACKS}{kind}" for kind in MEDIA if f"[{kind}]" in texts}
        if len(texts) == 1 and self.queue.is_logged(texts[0]):
            self.counts.skipped["bookkeeping"] += 1
        if row.is_compact_summary and self.last_preserved is not None:
            # Whatever the anchor names, what was kept follows the summary.
            self.last_preserved.anchor = row.uuid or ""
            self.preserved[row.uuid or ""] = self.last_preserved
        if row.interrupted_message_id and row.interrupted_message_id in self.by_message:
            self.by_message[row.interrupted_message_id].flags |= {"interrupted"}
        return turn

    def _system(self, offset: int, row: Row, parent: Turn | None) -> None:
        self.counts.rows_used += 1
        subtype = row.subtype
        if subtype == "compact_boundary":
            self._compact(row)
        elif subtype == "microcompact_boundary":
            cleared = rows.loose(row.microcompact_metadata).get("compactedToolIds")
            if isinstance(cleared, list) and cleared and parent is not None:
                turn = self._turn(offset, row, parent, "microcompact")
                turn.cleared = [item for item in cleared if isinstance(item, str)]
                self.by_row[row.uuid or ""] = turn
        elif subtype == "local_command":
            if text := attachments.plain(rows.plain_json(row.content)):
                self.by_row[row.uuid or ""] = self._turn(offset, row, parent, "command")
                self.turns[-1].texts = [text]
        elif row.retracted_message_uuids:
            for uuid in row.retracted_message_uuids:
                turn = self.by_row.get(uuid)
                if turn is not None and turn.kind == "assistant":
                    turn.flags |= {"retracted"}

    def _compact(self, row: Row) -> None:
        # What follows is a new root: the model sees the summary instead of what came before.
        self.segment += 1
        self.by_row[row.uuid or ""] = None
        metadata = rows.loose(row.compact_metadata)
        kept = self._kept_turns(metadata)
        self.last_preserved = None
        if not kept:
            return
        anchor = _anchor(metadata) or row.uuid or ""
        preserved = self.last_preserved = _Preserved(anchor, kept)
        for uuid in {anchor, *preserved.uuids(self.by_row)}:
            self.preserved[uuid] = preserved

    def _kept_turns(self, metadata: dict[str, Any]) -> list[Turn]:
        """Return the turns that a compaction kept word for word, in order."""
        listed = metadata.get("preservedMessages")
        if isinstance(listed, dict) and isinstance(listed.get("uuids"), list):
            turns = [self.by_row.get(u) for u in listed["uuids"] if isinstance(u, str)]
            return list(dict.fromkeys(turn for turn in turns if turn is not None))
        segment = metadata.get("preservedSegment")
        if not isinstance(segment, dict):
            return []
        tail = self.by_row.get(str(segment.get("tailUuid")))
        head = self.by_row.get(str(segment.get("headUuid")))
        kept: list[Turn] = []
        turn = tail
        while turn is not None:
            kept.append(turn)
            if turn is head:
                return kept[::-1]
            turn = turn.parent
        return []

    def _below_preserved(self, uuid: str, row: Row) -> Turn | None:
        preserved = self.preserved[uuid]
        anchor = self.by_row.get(preserved.anchor)
        # The summary itself goes before what was kept, though it names the same parent.
        if row.is_compact_summary:
            return self.by_row.get(uuid)
        if preserved.tail is None:
            # Kept messages are decided once and seen twice: copies carry the path on, and are no
            # states of their own. They are made at first use, when the anchor has its turn.
            parent = anchor
            for kept in preserved.turns:
                parent = kept.copy_below(parent, self.segment)
                self.turns.append(parent)
            preserved.tail = parent
        return preserved.tail

    def _attachment(self, offset: int, row: Row, parent: Turn | None) -> None:
        fields = rows.loose(row.attachment)
        if fields.get("type") == attachments.SNAPSHOT:
            self.counts.rows_used += 1
            self.snapshots.append(shape_of_snapshot(fields))
            return
        said = rows.plain_json(row.rendered)
        if said is not None:
            kind, text = attachments.attachment_turn(fields, said, row.rendered_role)
        else:
            kind = "queued" if fields.get("type") == "queued_command" else "attachment"
            text = attachments.shown(fields)
        if text is None:
            # The model may have seen it, and nobody knows in which words: this must be told.
            name = str(fields.get("type"))[:40]
            if name in attachments.UNLOGGED:
                self.counts.skipped["unlogged_words"] += 1
            else:
                self._unknown(f"attachment_{name}", row)
            if parent is not None:
                parent.flags |= {f"{LACKS}{name}"}
            return
        self.counts.rows_used += 1
        if text:
            is_queued = fields.get("type") == "queued_command"
            if is_queued and self.queue.is_logged(attachments.plain(fields.get("prompt"))):
                self.counts.skipped["bookkeeping"] += 1
            turn = self._turn(offset, row, parent, kind)
            turn.texts = [text]
            if "[image]" in text:
                turn.flags |= {f"{LACKS}image"}
            self.by_row[row.uuid or ""] = turn

    def _queue(self, offset: int, row: Row) -> None:
        """Follow what is typed, or told, while the model works."""
        text = attachments.plain(rows.plain_json(row.content))
        if row.operation == "enqueue" and self.turns and self.turns[0].texts == [text]:
            # Before 2.1.8x nothing else says so: without a screen the first request is queued, too.
            self.entrypoint = self.entrypoint or "sdk-cli"
        steps = (turn for turn in path_to(self.tips[False]) if turn.kind == "assistant")
        is_between = any(turn.calls for turn in islice(steps, 1))
        if not self.queue.take(row.operation, offset, text, is_between_steps=is_between):
            self.counts.skipped["bookkeeping"] += 1

    def _say_queued(self, row: Row, parent: Turn | None) -> Turn | None:
        """Put what was taken from the queue before the message that answers it; gives its last turn."""
        for offset, text in self.queue.taken:
            self.counts.rows_used += 1
            is_told = text.startswith("<task-notification>")
            parent = self._turn(offset, row, parent, "task_notification" if is_told else "queued")
            parent.uuid = f"{parent.uuid}-queued-{offset}"
            parent.texts = [text]
        self.queue.taken.clear()
        return parent

    def _replace(self, row: Row) -> None:
        """Put in place of large results what the model was shown of them."""
        self.counts.rows_used += 1
        for replaced in rows.replaced_results(row.replacements):
            call_id, text = replaced
            self.replaced[call_id] = text
            for turn, call in self.by_call.get(call_id, ()):
                if call.id == call_id and call_id in turn.results:
                    turn.results[call_id].text = text

    def _progress(self, offset: int, row: Row) -> None:
        self.counts.rows_used += 1
        found = rows.progress_row(row.data)
        if found is None:
            return
        agent_id, inner = found
        tree = self.agents.get(agent_id)
        if tree is None:
            tree = self.agents[agent_id] = LogTree(None, ReadCounts(), agent_id)
            tree.is_long = self.is_long
        inner.version, inner.cwd, inner.git_branch = row.version, row.cwd, row.git_branch
        inner.uuid = inner.uuid or row.uuid
        # Progress rows come in order and name parents of another file: each follows the last.
        tip = tree.tips[False]
        if inner.message is not None and inner.uuid not in tree.by_row:
            tree.place(offset, inner, tip)


_Signs = tuple[str | None, int | None, RowUsage | None]
"""What a row says of its message beside its id: the request, the place of its block, its usage."""


def _tell_apart(one: _Signs, other: _Signs) -> bool | None:
    """Return whether a later row with these signs belongs to another message, if they say so."""
    if one[0] and other[0]:
        return one[0] != other[0]
    if one[1] is not None and other[1] is not None:
        return other[1] <= one[1]
    mine, its = (usage.n_prompt if usage is not None else 0 for usage in (one[2], other[2]))
    return True if mine and its and mine != its else None


class _Queue:
    """Messages that came while the model worked, as the operations on them are logged.

    Beside what a person typed, the queue holds notes of tasks that ended, which wait for all of
    that, and, in some versions, notes of tasks that began, which are for the client alone.
    `dequeue` makes a request of its own of the first message, `popAll` gives what was typed back,
    and `remove` says only that something was taken out: between two steps of the model what a person
    typed, which goes along with the next request, and at the end of its turn the client's own notes.
    Until about 2.1.81 nothing else in the log says so; later versions log it once more, as an
    attachment.
    """

    def __init__(self) -> None:
        self._waiting: list[str] = []
        self.taken: list[tuple[int, str]] = []
        """Messages that the next request shows, each with the offset of the row that says so."""

    def take(
        self, operation: str | None, offset: int, text: str, *, is_between_steps: bool
    ) -> bool:
        """Take in one operation; tells whether the next request may show a message because of it."""
        if operation == "enqueue":
            self._waiting.append(text)
            return False
        if operation not in ("remove", "dequeue", "popAll") or not self._waiting:
            return False
        if operation == "popAll" and not text:
            self._waiting = [each for each in self._waiting if _rank_in_queue(each)]
            return False
        first = min(self._waiting, key=_rank_in_queue)
        notes = [each for each in self._waiting if _rank_in_queue(each) == 2]
        if operation == "remove" and notes and not (is_between_steps and not _rank_in_queue(first)):
            first = notes[0]
        found = text if text in self._waiting else first
        self._waiting.remove(found)
        is_said = operation == "remove" and found not in notes
        # Commands of the client are carried out by it, and not shown.
        if not is_said or not found or found.startswith("/"):
            return False
        self.taken.append((offset, found))
        return True

    def is_logged(self, text: str) -> bool:
        """Forget a message that has a row of its own; tells whether it had been taken out."""
        same = next((item for item in self.taken if item[1] == text), None)
        if same is not None:
            self.taken.remove(same)
        elif text in self._waiting:  # after an interruption nothing says that it was taken out
            self._waiting.remove(text)
        return same is not None


def _rank_in_queue(text: str) -> int:
    """Return 0 for what a person typed, 1 for a note to the model, 2 for one to the client."""
    if text.startswith("<task-notification>"):
        return 1
    if text.startswith("{"):
        with suppress(ValueError):
            return 2 if {"task_id", "task_type"} <= json.loads(text).keys() else 0
    return 0


def _thread_queued(turns: list[Turn]) -> None:
    """Put user turns that arrived while the agent worked into its line.

    A message that is typed during a tool loop, or a skill that one of several parallel calls
    loads, hangs beside the loop in the log, although every later step saw it. Such a turn has
    no answer of its own; it goes before the first step that was written after it.
    """
    children: dict[Turn, list[Turn]] = {}
    for index, turn in enumerate(turns):
        turn.index = index
        if turn.parent is not None:
            children.setdefault(turn.parent, []).append(turn)
    for parent, below in list(children.items()):
        if parent.kind != "assistant" or not parent.calls or len(below) < 2:
            continue
        for turn in tuple(below):
            if turn.kind in _QUEUED_KINDS and (line := _dead_end(turn, children)):
                _thread(line, parent, children)


_QUEUED_KINDS = frozenset({
    "user", "queued", "meta", "attachment", "task_notification", "system", "context", "preface"
})  # fmt: skip


_TOLD_KINDS = _QUEUED_KINDS - {"user", "queued"}


def _dead_end(turn: Turn, children: dict[Turn, list[Turn]]) -> list[Turn]:
    """Return the turn and what the client told below it; nothing where the conversation goes on there."""
    line = [turn]
    while below := children.get(line[-1]):
        is_told = len(below) == 1 and {below[0].kind, turn.kind} <= _TOLD_KINDS
        if not is_told:
            return []
        line += below
    return line


def _thread(line: list[Turn], parent: Turn, children: dict[Turn, list[Turn]]) -> None:
    turn, last = line[0], line[-1]
    above = parent
    # The bodies of skills that were loaded side by side stand one below the other. Of two messages
    # that a person typed there, though, one was taken back.
    is_told = turn.kind in _TOLD_KINDS
    while True:
        steps = [
            c
            for c in children.get(above, ())
            if c.kind == "assistant"
            or (is_told and c is not turn and c.kind in _TOLD_KINDS and c in children)
        ]
        if not steps:
            return
        step = steps[-1]  # the branch that was taken last: others were rewound
        if step.index > turn.index:
            break
        above = step
    children[parent].remove(turn)
    children[above].remove(step)
    children[above].append(turn)
    children[last] = [step]
    turn.parent, step.parent = above, last


def _uuids_in(line: bytes | bytearray) -> Iterator[bytes]:
    """Yield every `uuid` in a line: searching for the key alone is several times faster."""
    position = line.find(_UUID_KEY)
    while position >= 0:
        position += len(_UUID_KEY)
        match = _UUID_VALUE.match(line, position)
        if match is not None:
            yield bytes(match[1])
        position = line.find(_UUID_KEY, position)


class _Preserved:
    """Messages that a compaction kept: they stand between the summary and what follows."""

    def __init__(self, anchor: str, turns: list[Turn]) -> None:
        self.anchor = anchor
        self.turns = turns
        self.tail: Turn | None = None

    def uuids(self, by_row: dict[str, Turn | None]) -> list[str]:
        """Return rows of the kept turns: what follows may name any of them as parent."""
        kept = set(map(id, self.turns))
        return [uuid for uuid, turn in by_row.items() if id(turn) in kept]


def _anchor(metadata: dict[str, Any]) -> str | None:
    for key in ("preservedMessages", "preservedSegment"):
        part = metadata.get(key)
        if isinstance(part, dict) and isinstance(part.get("anchorUuid"), str):
            return part["anchorUuid"]
    return None


def _user_kind(row: Row, text: str) -> str:
    if row.is_compact_summary:
        return "summary"
    if _COMMAND.match(text):
        return "command"
    if text.startswith("[Request interrupted by user"):
        return "interrupt"
    if text.startswith("<task-notification>"):
        return "task_notification"
    return "meta" if row.is_meta else "user"


class ClaudeCode:
    """Reads the session files of Claude Code, of both format eras."""

    name = "claude_code"
    rank = 2

    def sniff(self, head: bytes) -> bool:
        """Return whether `head`, the first bytes of a file, has rows of this format."""
        for line in head.split(b"\n", 50)[:50]:
            for row in rows.repaired(line, ReadCounts()):
                if row.type in _ROW_TYPES and row.uuid and (row.session_id or row.message):
                    return True
                if row.type in {"summary", "file-history-snapshot", "queue-operation"}:
                    return True
        is_lines = not head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{\n", b"{\r", b"["))
        return is_lines and b'"parentUuid"' in head and b'"sessionId"' in head

    def read(self, path: Path, counts: ReadCounts, end: int | None = None) -> Iterator[SessionLog]:
        """Yield one log for the main conversation of `path`, and one for each subagent."""
        if path.name.startswith(_HOUSEKEEPING_AGENTS):
            for _ in rows.read_rows(path, counts, end):
                counts.skipped["housekeeping_agent"] += 1
            return
        file_agent = path.stem.removeprefix("agent-") if path.stem.startswith("agent-") else ""
        size, stem = path.stat().st_size if end is None else end, path.stem
        session_id: str | None = None
        tree = LogTree(path, counts, file_agent, size)
        tree.is_long = size > LONG_BYTES
        for offset, row in rows.read_rows(path, counts, size):
            # The id of the file's name if a row has it, else the first.
            if session_id is None or row.session_id == stem:
                session_id = row.session_id or session_id
            tree.add(offset, row)
        tree.finish()
        named = [turn.request for turn in tree.turns if turn.request]
        sent = read_sent(path, size) if named else None
        if sent is not None:
            join_siblings(sent, named, path)
        yield from logs_of(tree, session_id or path.stem, sent)


def logs_of(tree: LogTree, session_id: str, sent: SentRequests | None) -> Iterator[SessionLog]:
    """Yield the conversations of a tree: the main one, and one for each subagent."""
    by_agent: dict[str, list[Turn]] = {}
    for turn in tree.turns:
        by_agent.setdefault(turn.agent, []).append(turn)
    for agent_id, inner in tree.agents.items():
        by_agent.setdefault(agent_id, []).extend(inner.turns)
    title, names = tree.title(), frozenset(tree.by_row)
    # Of a long file these are megabytes, and it is all in memory until its rows are made.
    for found in (tree.by_row, tree.by_call, tree.by_message, tree.signs):
        found.clear()
    for agent_id, turns in by_agent.items():
        for index, turn in enumerate(turns):
            turn.index = index
        shown = _shown(turns, sent, tree)
        left_out = Counter(
            "retold" if turn.model != _NO_MODEL else "of_the_client"
            for turn in turns
            if turn.kind == "assistant" and not turn.is_state and turn.model
        )
        yield SessionLog(
            session_id=f"{session_id}.agent-{agent_id}" if agent_id else session_id,
            agent="claude_code",
            turns=turns,
            agent_id=agent_id or None,
            parent_session_id=session_id if agent_id else None,
            origins=frozenset(tree.origins),
            rows=frozenset() if agent_id else names,
            follows=frozenset(tree.follows),
            title=None if agent_id else title,
            client_usd={} if agent_id else _total(tree.client_usd),
            sent=shown,
            entrypoint=tree.entrypoint,
            left_out=left_out,
        )


def _total(counts: list[dict[str, float]]) -> dict[str, float]:
    models = {model for count in counts for model in count}
    return {model: sum(count.get(model, 0.0) for count in counts) for model in sorted(models)}


def _shown(turns: list[Turn], sent: SentRequests | None, tree: LogTree) -> list[Turn]:
    """Attach to each decision what it was shown, and return the turns of that."""
    if sent is None and not tree.snapshots:
        return []
    shown = SentTurns(sent or SentRequests())
    for turn in turns:
        if not turn.is_state:
            continue
        if turn.request is not None:
            shown.put(turn)
        if turn.shape is None and (n_seen := tree.n_snapshots.get(turn)):
            # The first snapshot of a run has no tools yet: those of the next are the same.
            after = tree.snapshots[n_seen - 1 :]
            shown.put_shape(turn, next((s for s in after if s["tools"]), after[0]))
    return shown.turns
