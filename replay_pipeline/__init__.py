"""Claude Code sessions to a preference dataset."""
