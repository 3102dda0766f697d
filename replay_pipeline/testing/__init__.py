"""Real stand-ins for paid services, for dry runs and tests."""
