"""Teachers on loopback that speak OpenRouter's protocol, for the demo, for tests, and for dry runs."""

from replay_pipeline.testing.faults import Fault
from replay_pipeline.testing.rehearsal import rehearsed_answers
from replay_pipeline.testing.router import Bill, ModelBill, Script
from replay_pipeline.testing.server import TeacherServer, script_of, serve_teachers

__all__ = [
    "Bill",
    "Fault",
    "ModelBill",
    "Script",
    "TeacherServer",
    "rehearsed_answers",
    "script_of",
    "serve_teachers",
]
