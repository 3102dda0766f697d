"""verifiers: recorded states as tasksets.

`taskset` has those of a published dataset, one decision a rollout; `served` those of a server that checks
what was done. Both import the package; `wire` translates messages and needs nothing.
"""
