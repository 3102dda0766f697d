"""Dagster: assets that read, call one library function, and report; its home, records, and server."""
