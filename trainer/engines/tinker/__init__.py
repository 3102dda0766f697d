"""The three channels on the Tinker API: the only room that imports `tinker`.

Weights and gradients live on a server, Thinking Machines' own or an open one that speaks its
protocol; losses and everything about the dataset live here.
"""
