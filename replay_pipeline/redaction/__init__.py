"""Take secrets and personal data out of text, and keep text from steering a terminal."""
