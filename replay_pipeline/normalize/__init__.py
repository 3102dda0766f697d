"""Preference pairs to the pairs fit to publish, through data-juicer."""
