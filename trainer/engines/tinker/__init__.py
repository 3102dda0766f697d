"""The three channels on the Tinker API. Only this package imports `tinker`.

Weights and gradients are on a server: Thinking Machines' own, or an open one with the same
protocol. Losses and everything about the dataset are here.
"""
