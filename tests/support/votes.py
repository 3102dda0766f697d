"""Extraction by votes alone: every consensus against the agent makes a pair, however sure it is."""

from replay_pipeline.judge import extract


def extract_pairs(*given, **options):
    """Keep pairs whatever their probability."""
    return extract.extract_pairs(*given, **{"min_p_better": 0.0, **options})


def extract_dpo_pairs(*given, **options):
    """Return the pairs alone."""
    return extract_pairs(*given, **options).pairs
