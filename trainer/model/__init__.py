"""What runs a causal language model fast and exactly: loading, trees, packing, cached prefixes, head."""
