"""For tests, benchmarks and the demo: teachers and a dataset Hub on loopback, in their protocols."""

from replay_pipeline.testing.faults import Fault
from replay_pipeline.testing.hub import HubServer
from replay_pipeline.testing.roots import write_settings
from replay_pipeline.testing.router import Bill, ModelBill, Script
from replay_pipeline.testing.server import TeacherServer, script_of, serve

__all__ = [
    "Bill",
    "Fault",
    "HubServer",
    "ModelBill",
    "Script",
    "TeacherServer",
    "script_of",
    "serve",
    "write_settings",
]
