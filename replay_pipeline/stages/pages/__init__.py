"""Web pages that show sessions, pairs, and results, and the marks that people gave.

Session text is untrusted. A page gets it only as data, and its content security policy allows only
the page's own scripts.
"""

from replay_pipeline.stages.pages.compare import Comparison, pooled_accuracy
from replay_pipeline.stages.pages.look import Contents, look, write_page
from replay_pipeline.stages.pages.pairs import (
    Mark,
    doubts,
    in_portions,
    portion,
    rank_pairs,
    read_chances,
    read_marks,
    review_score,
)
from replay_pipeline.stages.pages.sides import differ, last_request, native_sides, over_lines

__all__ = [
    "Comparison",
    "Contents",
    "Mark",
    "differ",
    "doubts",
    "in_portions",
    "last_request",
    "look",
    "native_sides",
    "over_lines",
    "pooled_accuracy",
    "portion",
    "rank_pairs",
    "read_chances",
    "read_marks",
    "review_score",
    "write_page",
]
