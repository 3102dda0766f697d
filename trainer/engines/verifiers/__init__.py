"""verifiers: recorded states of a published dataset as a taskset, one decision a rollout.

`wire` translates messages and needs nothing; `taskset` imports the package.
"""
