"""verifiers: recorded states as tasksets.

`taskset` has the states of a published dataset, with one decision per rollout. `served` has those of
a server that checks the result. Both import the package. `wire` translates messages without it.
"""
