"""Hints from failed steps. No tensors here."""
