"""Dagster on one data root: its home, its records, and the cleanup after a crash."""
