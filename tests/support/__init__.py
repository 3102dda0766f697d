"""Servers, writers and clients that only tests and benchmarks need."""
