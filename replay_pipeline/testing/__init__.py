"""Teachers on loopback that speak OpenRouter's protocol, for the demo, for tests, and for dry runs."""

from replay_pipeline.testing.router import Bill, ModelBill, Script
from replay_pipeline.testing.server import TeacherServer, serve_teachers

__all__ = [
    "Bill",
    "ModelBill",
    "Script",
    "TeacherServer",
    "serve_teachers",
]
