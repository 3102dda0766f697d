"""Run the trainer on a mesh of Monarch actors, which one controller keeps alive.

`placement` says who runs where, and works without Monarch. Every other module imports Monarch.
"""
