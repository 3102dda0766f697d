"""Loopback servers that speak the protocols of two clouds; every job is a local process."""

import asyncio
import base64
import contextlib
import inspect
import json
import os
import re
import signal
import subprocess
import threading
import time
import uuid
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Job:
    """One process with its log, its limit and how it was ended."""

    folder: Path
    argv: list[str]
    env: dict[str, str]
    timeout_s: float
    labels: dict[str, str]
    id: str
    ended_by: str = ""
    process: subprocess.Popen = field(init=False)
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self):
        with (self.folder / f"{self.id}.log").open("wb") as log:
            self.process = subprocess.Popen(
                self.argv,
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def code(self):
        """Return the exit code, or None while it runs; enforce the limit."""
        if self.process.poll() is None and time.monotonic() - self.began > self.timeout_s:
            self.end("timeout")
        return self.process.poll()

    def end(self, why):
        self.ended_by = why
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def log(self):
        return (self.folder / f"{self.id}.log").read_text()


class JobsHub:
    """The Jobs part of the Hugging Face Hub's REST interface.

    `failing` holds what to do to the next POSTs: "503" refuses one, "lost" starts the job and
    loses the answer.
    """

    def __init__(self, folder):
        self.folder = folder
        self.jobs = {}
        self.failing = []
        self.bodies = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                hub.get(self)

            def do_POST(self):
                hub.post(self)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
        for job in self.jobs.values():
            job.end("closed")

    def get(self, request):
        path = request.path.partition("?")[0]
        if path == "/api/whoami-v2":
            return self.answer(request, {"name": "me", "type": "user", "id": "u", "orgs": []})
        if path == "/api/jobs/me":
            return self.answer(request, [self.info(job) for job in self.jobs.values()])
        if (match := re.fullmatch(r"/api/jobs/me/(\w+)(/logs)?", path)) and match[1] in self.jobs:
            job = self.jobs[match[1]]
            return self.stream(request, job) if match[2] else self.answer(request, self.info(job))
        return self.answer(request, {"error": "not found"}, 404)

    def post(self, request):
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        if match := re.fullmatch(r"/api/jobs/me/(\w+)/cancel", request.path):
            self.jobs[match[1]].end("cancel")
            return self.answer(request, {})
        fault = self.failing.pop(0) if self.failing else ""
        if fault.isdecimal():
            return self.answer(request, {"error": "unavailable"}, int(fault))
        spec = json.loads(body)
        self.bodies.append(spec)
        job = Job(
            self.folder,
            spec["command"],
            {**spec["environment"], **spec.get("secrets", {})},
            spec["timeoutSeconds"],
            spec["labels"],
            uuid.uuid4().hex[:24],
        )
        self.jobs[job.id] = job
        if fault == "lost":
            return self.answer(request, {"error": "gateway timeout"}, 504)
        return self.answer(request, self.info(job))

    def info(self, job):
        code = job.code()
        stage, message = "RUNNING", None
        if job.ended_by == "cancel":
            stage = "CANCELED"
        elif job.ended_by == "timeout":
            stage, message = "ERROR", "Job timeout"
        elif code == 0:
            stage = "COMPLETED"
        elif code is not None:
            stage, message = "ERROR", f"Job failed with exit code: {code % 256}"
        return {
            "id": job.id,
            "createdAt": "2026-01-01T00:00:00.000Z",
            "owner": {"id": "u", "name": "me", "type": "user"},
            "command": job.argv,
            "arguments": [],
            "environment": {},
            "flavor": "cpu-basic",
            "labels": job.labels,
            "dockerImage": "python:3.12",
            "status": {"stage": stage, "message": message},
        }

    def stream(self, request, job):
        """Send the log as server-sent events."""
        request.send_response(200)
        request.send_header("Content-Type", "text/event-stream")
        request.send_header("Connection", "close")
        request.end_headers()
        for line in job.log().splitlines():
            event = json.dumps({"data": line, "timestamp": "2026-01-01T00:00:00.000Z"})
            request.wfile.write(f"data: {event}\n\n".encode())
        request.close_connection = True

    def answer(self, request, value, status=200):
        data = json.dumps(value).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)


class SandboxCloud:
    """The part of Modal's gRPC control plane that sandboxes need."""

    def __init__(self, folder):
        import grpclib.server

        self.folder = folder
        self.jobs = {}
        self.secrets = {}
        self.definitions = []
        self.loop = asyncio.new_event_loop()
        self.server = None
        ready = threading.Event()

        async def serve():
            self.server = grpclib.server.Server([servicer(self)])
            await self.server.start("127.0.0.1", 0)
            port = self.server._server.sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{port}"
            ready.set()

        def run():
            asyncio.set_event_loop(self.loop)
            self.loop.run_until_complete(serve())
            self.loop.run_forever()
            self.loop.run_until_complete(hang_up())
            self.loop.close()

        async def hang_up():
            self.server.close()
            for transport in list(self.loop._transports.values()):
                transport.close()
            await self.server.wait_closed()
            await asyncio.sleep(0.1)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        ready.wait()

    def close(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        for job in self.jobs.values():
            job.end("closed")

    def start(self, request):
        definition = request.definition
        self.definitions.append(definition)
        env = {}
        for secret in definition.secret_ids:
            env.update(self.secrets[secret])
        job = Job(
            self.folder,
            list(definition.entrypoint_args),
            env,
            definition.timeout_secs,
            {},
            f"sb-{uuid.uuid4().hex[:22]}",
        )
        self.jobs[job.id] = job
        return job.id


def servicer(cloud):  # noqa: C901 - one small function per remote procedure
    """Return a gRPC servicer; methods that are not here answer UNIMPLEMENTED."""
    from grpclib import GRPCError, Status
    from modal_proto import api_grpc, api_pb2

    generic = api_pb2.GenericResult

    def result(job):
        code = job.code()
        if code is None:
            return generic()
        if job.ended_by == "timeout":
            return generic(status=generic.GENERIC_STATUS_TIMEOUT)
        if job.ended_by == "cancel":
            return generic(status=generic.GENERIC_STATUS_TERMINATED)
        status = generic.GENERIC_STATUS_SUCCESS if code == 0 else generic.GENERIC_STATUS_FAILURE
        return generic(status=status, exitcode=code if code >= 0 else 128 - code)

    async def sandbox_wait(request):
        job = cloud.jobs[request.sandbox_id]
        until = time.monotonic() + request.timeout
        while job.code() is None and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return api_pb2.SandboxWaitResponse(result=result(job))

    def secret_created(request):
        name = f"st-{uuid.uuid4().hex[:8]}"
        cloud.secrets[name] = dict(request.env_dict)
        return api_pb2.SecretGetOrCreateResponse(secret_id=name)

    def logs(request):
        is_out = request.file_descriptor == api_pb2.FILE_DESCRIPTOR_STDOUT
        text = cloud.jobs[request.sandbox_id].log() if is_out else ""
        items = [api_pb2.TaskLogs(data=text, file_descriptor=request.file_descriptor)]
        return [
            api_pb2.TaskLogsBatch(items=items, entry_id="1"),
            api_pb2.TaskLogsBatch(eof=True),
        ]

    def terminated(request):
        cloud.jobs[request.sandbox_id].end("cancel")
        return api_pb2.SandboxTerminateResponse()

    def token(_):
        def part(value):
            return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

        expiry = 4_000_000_000
        return api_pb2.AuthTokenGetResponse(
            token=f"{part({'alg': 'none'})}.{part({'exp': expiry})}.x"
        )

    success = generic(status=generic.GENERIC_STATUS_SUCCESS)
    settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06", webhook_suffix="")
    environment = api_pb2.EnvironmentMetadata(name="main", settings=settings)
    answers = {
        "ClientHello": lambda _: api_pb2.ClientHelloResponse(),
        "AuthTokenGet": token,
        "AppGetOrCreate": lambda r: api_pb2.AppGetOrCreateResponse(app_id=f"ap-{r.app_name}"),
        "EnvironmentGetOrCreate": lambda _: api_pb2.EnvironmentGetOrCreateResponse(
            environment_id="en-1", metadata=environment
        ),
        "ImageGetOrCreate": lambda r: api_pb2.ImageGetOrCreateResponse(
            image_id="im-1",
            metadata=api_pb2.ImageMetadata(image_builder_version=r.builder_version),
            result=success,
        ),
        "SecretGetOrCreate": secret_created,
        "SandboxCreate": lambda r: api_pb2.SandboxCreateResponse(sandbox_id=cloud.start(r)),
        "SandboxGetTaskId": lambda _: api_pb2.SandboxGetTaskIdResponse(task_id="ta-1"),
        "SandboxWait": sandbox_wait,
        "SandboxGetLogs": logs,
        "SandboxTerminate": terminated,
    }

    def method(name):
        async def call(self, stream):
            request = await stream.recv_message()
            if name not in answers:
                raise GRPCError(Status.UNIMPLEMENTED, name)
            answer = answers[name](request)
            if inspect.isawaitable(answer):
                answer = await answer
            for message in answer if isinstance(answer, list) else [answer]:
                await stream.send_message(message)

        return call

    names = api_grpc.ModalClientBase.__abstractmethods__
    methods = {name: method(name) for name in names}
    return type("Servicer", (api_grpc.ModalClientBase,), methods)()
