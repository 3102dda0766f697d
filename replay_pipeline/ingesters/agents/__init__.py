"""Readers of the logs of other agents than Claude Code, each found by its entry point."""
