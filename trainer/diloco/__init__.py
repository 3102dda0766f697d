"""The outer loop: replicas that share nothing but an object store."""
