"""What a call can see or change: which calls depend on each other's order, and which only look."""

from replay_pipeline.actions.canonical import Call
from replay_pipeline.actions.keys import keys_of
from replay_pipeline.actions.shell import ShellPlan, shell_plan
from replay_pipeline.actions.tools import Reach, reach_of_tool


def reach_of(call: Call) -> Reach:
    """Return how far a valid call reaches: whether it only looks, or what it may change."""
    if call.name == "Bash":
        return "look" if plan_of(call).only_looks else "anything"
    return reach_of_tool(call.name)


def plan_of(call: Call) -> ShellPlan:
    """Read the command of a valid call of Bash."""
    return shell_plan(call.values()["command"], call.cwd)


def depend(one: Call, other: Call) -> bool:
    """Return whether the order of two calls can matter.

    Looks see no other look; changes of different objects do not meet; a Read sees the file that it
    names, any other look may see everything.
    """
    reaches = {reach_of(one), reach_of(other)}
    if "nothing" in reaches or reaches == {"look"}:
        return False
    if "anything" in reaches:
        return True
    names_one = reaches == {"object"} or "Read" in (one.name, other.name)
    return not names_one or keys_of(one).target == keys_of(other).target
