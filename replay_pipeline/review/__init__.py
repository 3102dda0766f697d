"""Looking at pairs: as text in a terminal, or as one HTML file with marks that are read back.

Session text is untrusted: it reaches the page as data only, and the page's content security
policy lets nothing run but its own script.
"""

from replay_pipeline.review.marks import Mark, apply_marks, read_chances, read_marks
from replay_pipeline.review.order import doubts, rank_pairs, review_score
from replay_pipeline.review.page import write_review
from replay_pipeline.review.sides import last_request, readable
from replay_pipeline.review.text import show_state

__all__ = [
    "Mark",
    "apply_marks",
    "doubts",
    "last_request",
    "rank_pairs",
    "read_chances",
    "read_marks",
    "readable",
    "review_score",
    "show_state",
    "write_review",
]
