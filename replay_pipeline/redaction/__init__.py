"""Remove secrets and personal data from text, and make text harmless for terminals."""
