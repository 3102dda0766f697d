"""verifiers: the recorded states of a published dataset as a taskset, with one decision per rollout.

`wire` translates messages without any package. `taskset` imports `verifiers`.
"""
