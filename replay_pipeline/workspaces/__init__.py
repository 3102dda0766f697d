"""Rebuild the working tree at each decision, and find out what an action does there.

Read `logs.py` (the calls that a log records), `git.py` (the project's git history), `history.py`
(both combined into the files as they were), `tools.py` (run an action on them), then `verdicts.py`
(whether it works).
"""
