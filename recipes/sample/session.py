"""What happens in a session besides requests and calls: commands, refusals, rewinds, compactions."""

from collections.abc import Sequence
from typing import Any

from tests.support.sessions import CHARS_PER_TOKEN, Row, SessionBuilder

REJECTED = (
    "The user doesn't want to proceed with this tool use. The tool use was rejected (eg. if it was"
    " a file edit, the new_string was NOT written to the file)."
)
INTERRUPTED = "[Request interrupted by user]"
INTERRUPTED_FOR_TOOL_USE = "[Request interrupted by user for tool use]"


class SampleSession(SessionBuilder):
    """A session of the sample; `rewind` moves the head back to a row's uuid."""

    def meta(self, content: str) -> str:
        """Append a row that the model sees and the user did not type: a caveat, a skill body."""
        return self._user_row(content, isMeta=True)

    def local_command(self, name: str, stdout: str = "") -> str:
        """Append a slash command that ran without the model, with its caveat and output."""
        self.wait(20)
        self.meta(
            "<local-command-caveat>The user ran the commands below; do not respond to them unless"
            " asked.</local-command-caveat>"
        )
        self._user_row(
            f"<command-name>/{name}</command-name>\n"
            f"<command-message>{name}</command-message>\n<command-args></command-args>"
        )
        return self._user_row(f"<local-command-stdout>{stdout}</local-command-stdout>")

    def interrupt(self, *, for_tool_use: bool = False) -> str:
        """Append the row that says the user stopped the model."""
        text = INTERRUPTED_FOR_TOOL_USE if for_tool_use else INTERRUPTED
        extra: Row = {}
        if self.era == "attachment" and self._last_message_id:
            extra["interruptedMessageId"] = self._last_message_id
        return self._user_row([{"type": "text", "text": text}], **extra)

    def queue(self, text: str) -> None:
        """Queue a message while the model works: the ledger and, in the later era, its row.

        In the progress era call `user` afterwards, when the message is delivered.
        """
        self.bookkeeping("queue-operation", operation="enqueue", content=text)
        queued_at = self._stamp()
        self.wait(2)
        if self.era == "attachment":
            self.bookkeeping("queue-operation", operation="remove")
            self.attachment(
                "queued_command",
                prompt=text,
                commandMode="prompt",
                origin={"kind": "human"},
                source_uuid=self._uuid(),
                timestamp=queued_at,
            )
        else:
            self.bookkeeping("queue-operation", operation="dequeue")

    def reject(self, tool_use_id: str, feedback: str | None = None) -> str:
        """Append the user's refusal of a call, with what they said instead.

        Without feedback the turn ends, so the interrupt row follows.
        """
        self.wait(9)
        tail = (
            f" To tell you how to proceed, the user said:\n{feedback}"
            if feedback
            else " STOP what you are doing and wait for the user to tell you how to proceed."
        )
        extra: Row = {}
        if self.era == "attachment":
            extra["toolDenialKind"] = "user-rejected"
            if feedback:
                extra["userFeedback"] = feedback
        row = self.result(
            tool_use_id,
            REJECTED + tail,
            is_error=True,
            side_car="User rejected tool use" if not feedback else f"Error: {REJECTED}{tail}",
            **extra,
        )
        return row if feedback else self.interrupt(for_tool_use=True)

    def rewind(self, row_uuid: str | None) -> None:
        """Continue below an earlier row; the rows after it stay as an abandoned branch."""
        self.head = row_uuid
        self._n_chars = self._chars_at[row_uuid] if row_uuid else 0
        self._n_cached = 0

    def compact(self, summary: str, *, trigger: str = "auto", preserved: Sequence[str] = ()) -> str:
        """Append a compaction: a boundary without a parent, then the summary the model sees.

        Args:
            summary: The text that replaces the history.
            trigger: `auto` or `manual`.
            preserved: Uuids of rows kept verbatim, oldest first (attachment era only).
        """
        self.wait(30)
        n_before = self._context_tokens()
        boundary_uuid, summary_uuid = self._uuid(), self._uuid()
        metadata: Row = {"trigger": trigger, "preTokens": n_before}
        if self.era == "attachment":
            n_after = self.base_tokens + round(len(summary) / CHARS_PER_TOKEN)
            metadata |= {
                "postTokens": n_after,
                "cumulativeDroppedTokens": n_before - n_after,
                "durationMs": 18_000 + round(self._jitter(9_000)),
            }
        if preserved:
            metadata["preservedSegment"] = {
                "headUuid": preserved[0],
                "anchorUuid": summary_uuid,
                "tailUuid": preserved[-1],
            }
            metadata["preservedMessages"] = {
                "anchorUuid": summary_uuid,
                "uuids": list(preserved),
                "allUuids": list(preserved),
            }
        logical_parent, self.head = self.head, None
        self._append(
            {
                "type": "system",
                "subtype": "compact_boundary",
                "content": "Conversation compacted",
                "isMeta": False,
                "level": "info",
                "logicalParentUuid": logical_parent,
                "compactMetadata": metadata,
            },
            row_uuid=boundary_uuid,
        )
        self._n_chars = 0
        self._n_cached = 0
        return self._user_row(
            summary, row_uuid=summary_uuid, isCompactSummary=True, isVisibleInTranscriptOnly=True
        )

    def system(self, subtype: str, **fields: Any) -> str:
        """Append a `system` row: turn_duration, stop_hook_summary, api_error, ..."""
        return self._append({"type": "system", "subtype": subtype, **fields})

    def snapshot(self, *paths: str) -> None:
        """Append a file-history-snapshot of the files about to change."""
        stamp = self._stamp()
        backups = {
            path: {
                "backupFileName": f"{self._digest(path, 8).hex()}@v1",
                "version": 1,
                "backupTime": stamp,
            }
            for path in paths
        }
        message_id = self.head or self.session_id
        self.rows.append(
            {
                "type": "file-history-snapshot",
                "messageId": message_id,
                "snapshot": {
                    "messageId": message_id,
                    "trackedFileBackups": backups,
                    "timestamp": stamp,
                },
                "isSnapshotUpdate": bool(paths),
            }
        )

    def summary(self, text: str) -> None:
        """Append a `summary` row, which titles the conversation that ends at the head."""
        self.rows.append({"type": "summary", "summary": text, "leafUuid": self.head})
