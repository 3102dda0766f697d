"""verifiers: recorded states as a taskset.

`taskset` has the states of a published dataset, or of a server that plays them. It imports the
package. `wire` translates messages without it.
"""
