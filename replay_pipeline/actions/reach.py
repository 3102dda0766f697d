"""What a call can see or change, and so which calls depend on each other's order."""

from replay_pipeline.actions.canonical import Call
from replay_pipeline.actions.keys import keys_of
from replay_pipeline.actions.shell import ShellPlan, shell_plan
from replay_pipeline.actions.tools import Reach, reach_of_tool


def reach_of(call: Call) -> Reach:
    """Return whether a valid call only looks, or what it may change."""
    if call.name == "Bash":
        return "look" if plan_of(call).only_looks else "anything"
    return reach_of_tool(call.name)


def plan_of(call: Call) -> ShellPlan:
    """Return the plan of the command in a valid call of Bash."""
    return shell_plan(call.values()["command"], call.cwd)


def depend(one: Call, other: Call) -> bool:
    """Return whether the order of two calls can matter.

    Two calls that only look never depend on each other, and neither do changes of different
    objects. A Read depends on changes of its file. Any other look may depend on every change.
    """
    reaches = {reach_of(one), reach_of(other)}
    if "nothing" in reaches or reaches == {"look"}:
        return False
    if "anything" in reaches:
        return True
    names_one = reaches == {"object"} or "Read" in (one.name, other.name)
    return not names_one or keys_of(one).target == keys_of(other).target
