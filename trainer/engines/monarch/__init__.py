"""Runs of the trainer on a mesh of Monarch actors, kept alive by one controller.

`placement` says who runs where and needs no Monarch; every other module imports it.
"""
