"""Trace states to teacher actions, under a hard budget."""
