"""For tests, benchmarks and the demo: teachers on loopback that speak the OpenRouter protocol."""

from replay_pipeline.testing.faults import Fault
from replay_pipeline.testing.router import Bill, ModelBill, Script
from replay_pipeline.testing.server import TeacherServer, script_of, serve

__all__ = ["Bill", "Fault", "ModelBill", "Script", "TeacherServer", "script_of", "serve"]
