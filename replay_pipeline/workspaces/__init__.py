"""The working tree behind every decision, and what an action does there.

Read `logs.py` (what a log says that was done), `git.py` (what the project's own history holds),
`history.py` (the two together: the files as they were), `tools.py` (an action on them), then
`verdicts.py` (what became of it).
"""
