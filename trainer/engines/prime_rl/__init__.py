"""The three channels on PRIME-RL: the only room that imports `prime_rl`.

PRIME-RL comes from its repository and wants Python 3.12; everything here but `register` also works
without it.
"""
