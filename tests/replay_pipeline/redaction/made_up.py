"""Secrets that are nobody's."""

GITHUB = "ghp_" + "a1B2c3D4e5F6" * 3
VALUE = "q7Uxv29Kpw41LmZt8Rb3Yd1"
"""Random enough for a secret, and of no form that a provider has published."""
