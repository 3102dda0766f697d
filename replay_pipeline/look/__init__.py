"""Sessions at a glance: a table and one HTML file, from the logs alone."""

from replay_pipeline.look.look import look

__all__ = ["look"]
