"""Checks of the stored data, independent of the stages that wrote it.

Each function returns an `AuditResult`: whether the check passes, its figures, and what to do if it
fails.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_MAX_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """The result of one check, with the remedy if it fails."""

    problems: Sequence[str] = ()
    """What is wrong and where. Empty if all is well."""
    what_to_do: str = ""
    facts: Mapping[str, float | int | str] = field(default_factory=dict)
    """Figures to follow over time."""
    is_warning: bool = False
    """Whether a failure is only a warning, so that the data may still be used."""
    judged: int | None = None
    """How many rows, batches, or files were checked. With 0, a pass means nothing."""

    @property
    def holds(self) -> bool:
        """Return whether the check passes."""
        return not self.problems

    def message(self) -> str:
        """Return the problem and the remedy in one paragraph, or an empty text."""
        if self.holds:
            return "Judged nothing: there is not enough to judge yet." if self.judged == 0 else ""
        named = "; ".join(self.problems[:_MAX_NAMED])
        more = len(self.problems) - _MAX_NAMED
        rest = f"; and {more} more" if more > 0 else ""
        return f"{named}{rest}. {self.what_to_do}".strip()
