"""Dagster on one data root: its home, its records, and what a crash leaves in them."""
