"""Normalized pairs to a Hugging Face dataset: a folder or the Hub."""
