"""The three channels on PRIME-RL. Only this package imports `prime_rl`.

PRIME-RL is installed from its repository and needs Python 3.12. All modules but `register` also
work without it.
"""
