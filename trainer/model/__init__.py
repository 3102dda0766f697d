"""Run a causal language model fast and exactly: loading, prefix trees, packing, cached prefixes, and the head."""
