"""Judge answers: whether they make a pair, how likely it is right, and what a prompt allows.

Start with `extract.py`, which goes from a state and its answers to a pair. `belief.py` says how
likely its sides are right and wrong, `strengths.py` estimates who is right how often, and `feasibility.py` says which actions are possible at a prompt.
The functions are pure: they read no file and run no command.
"""
