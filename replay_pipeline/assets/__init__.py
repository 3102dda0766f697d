"""Dagster assets: each reads, calls one library function, and reports."""
