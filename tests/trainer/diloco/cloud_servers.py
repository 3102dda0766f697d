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
from pathlib import Path

from tests.loopback import LoopbackServer

HARDWARE = {
    "name": "cpu-basic", "prettyName": "CPU Basic", "cpu": "2 vCPU", "ram": "16 GB",
    "accelerator": None, "unitCostMicroUSD": 167, "unitCostUSD": 0.000167, "unitLabel": "minute",
}  # fmt: skip
"""A line of Hugging Face's price list, as its client documents it."""


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

    def told(self):
        """Return the stage and the message that the Hub tells, and the durations, if it does."""
        code = self.code()
        if self.ended_by == "cancel":
            return "CANCELED", None, None
        if self.ended_by == "timeout":
            return "ERROR", "Job timeout", None
        if code is None:
            return "RUNNING", None, None
        failed = f"Job failed with exit code: {code % 256}"
        return ("ERROR", failed, None) if code else ("COMPLETED", None, None)


class JobsHub(LoopbackServer):
    """The Jobs part of the Hugging Face Hub's REST interface.

    `failing` holds what to do to the next POSTs: "503" refuses one, "lost" starts the job and
    loses the answer.
    """

    def __init__(self, folder=None):
        self.folder = folder
        self.jobs = {}
        self.failing = []
        self.bodies = []
        super().__init__()

    def close(self):
        super().close()
        for job in self.jobs.values():
            job.end("closed")

    def serve(self, request, body):
        if request.command == "POST":
            self.post(request, body)
        else:
            self.get(request)

    def get(self, request):
        path = request.path.partition("?")[0]
        if path == "/api/whoami-v2":
            return self.answer_json(request, {"name": "me", "type": "user", "id": "u", "orgs": []})
        if path == "/api/jobs/hardware":
            a10g = {**HARDWARE, "name": "a10g-large", "unitCostUSD": 0.025}
            return self.answer_json(request, [HARDWARE, a10g])
        if path == "/api/jobs/me":
            return self.answer_json(request, [self.info(job) for job in self.listed()])
        if (match := re.fullmatch(r"/api/jobs/me/(\w+)(/logs)?", path)) and self.knows(match[1]):
            job = self.jobs[match[1]]
            return (
                self.stream(request, job) if match[2] else self.answer_json(request, self.info(job))
            )
        return self.answer_json(request, {"error": "not found"}, 404)

    def listed(self):
        return list(self.jobs.values())

    def knows(self, name):
        return name in self.jobs

    def post(self, request, body):
        if match := re.fullmatch(r"/api/jobs/me/(\w+)/cancel", request.path):
            if not self.knows(match[1]):
                return self.answer_json(request, {"error": "not found"}, 404)
            self.jobs[match[1]].end("cancel")
            return self.answer_json(request, {})
        fault = self.fault()
        if fault.isdecimal():
            return self.answer_json(request, {"error": "unavailable"}, int(fault))
        spec = json.loads(body)
        self.bodies.append(spec)
        job = self.made(spec)
        self.jobs[job.id] = job
        if fault == "lost":
            return self.lose(request)
        return self.answer_json(request, self.info(job))

    def fault(self):
        return self.failing.pop(0) if self.failing else ""

    def lose(self, request):
        self.answer_json(request, {"error": "gateway timeout"}, 504)

    def made(self, spec):
        """Return what a request starts."""
        env = {**spec["environment"], **spec.get("secrets", {})}
        name = uuid.uuid4().hex[:24]
        return Job(self.folder, spec["command"], env, spec["timeoutSeconds"], spec["labels"], name)

    def info(self, job):
        stage, message, durations = job.told()
        told = {
            "id": job.id,
            "createdAt": "2026-01-01T00:00:00.000Z",
            "owner": {"id": "u", "name": "me", "type": "user"},
            "command": job.argv,
            "flavor": "cpu-basic",
            "labels": job.labels,
            "dockerImage": "python:3.12",
            "status": {"stage": stage, "message": message},
        }
        return told if durations is None else {**told, "durations": durations}

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


class SandboxCloud:
    """The part of Modal that sandboxes need, in both versions of the protocol.

    Version 1 (GPUs) is all control plane. Version 2 asks the control plane for a short-lived
    token and reads the streams from the worker, which is a service of the same server here.
    """

    def __init__(self, folder):
        import grpclib.server

        self.folder = folder
        self.jobs = {}
        self.secrets = {}
        self.definitions = []
        self.calls = set()
        self.named = {}
        self.tags = {}
        self.failing = []
        self.is_offline = lambda: False
        self.loop = asyncio.new_event_loop()
        self.server = None
        ready = threading.Event()

        async def serve():
            self.server = grpclib.server.Server([control_plane(self), worker(self)])
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

    def is_there(self, name):
        return name in self.jobs

    knows = is_there

    def made(self, definition, env, name):
        """Return what a request starts."""
        argv = list(definition.entrypoint_args)
        return Job(self.folder, argv, env, definition.timeout_secs, {}, name)

    def start(self, definition, env, name):
        """Run a sandbox; return its name."""
        from grpclib import GRPCError, Status

        known = self.jobs.get(self.named.get(definition.name))
        if known is not None and known.code() is None:
            raise GRPCError(Status.ALREADY_EXISTS, f"a sandbox named {definition.name} runs")
        self.definitions.append(definition)
        self.named[definition.name] = name
        self.jobs[name] = self.made(definition, env, name)
        return name


def service(base, cloud, answers, is_allowed=lambda name, metadata: True):
    """Return a gRPC service; methods without an answer say UNIMPLEMENTED.

    An answer is a function of the request that gives a message, a list of them, or an awaitable.
    """
    from grpclib import GRPCError, Status

    def method(name):
        async def call(self, stream):
            request = await stream.recv_message()
            if name not in answers:
                raise GRPCError(Status.UNIMPLEMENTED, name)
            if not is_allowed(name, stream.metadata):
                raise GRPCError(Status.UNAUTHENTICATED, name)
            if cloud.is_offline():
                raise GRPCError(Status.UNAVAILABLE, "no route to the control plane")
            cloud.calls.add(name)
            answer = answers[name](request)
            if (
                name.startswith("SandboxCreate")
                and cloud.failing
                and cloud.failing.pop(0) == "lost"
            ):
                raise GRPCError(Status.UNAVAILABLE, "the answer is lost")
            if inspect.isawaitable(answer):
                answer = await answer
            for message in answer if isinstance(answer, list) else [answer]:
                await stream.send_message(message)

        return call

    methods = {name: method(name) for name in base.__abstractmethods__}
    return type("Service", (base,), methods)()


def token():
    """Return a token that has not expired."""

    def part(value):
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    return f"{part({'alg': 'none'})}.{part({'exp': 4_000_000_000})}.x"


def task_of(sandbox_id):
    """Return the name of a sandbox's task; a last V marks version 2."""
    return sandbox_id.replace("sb-", "ta-") + "V"


def control_plane(cloud):
    """Return the service that makes, watches and ends sandboxes."""
    from modal_proto import api_grpc, api_pb2

    settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06", webhook_suffix="")
    environment = api_pb2.EnvironmentMetadata(name="main", settings=settings)

    def secret_created(request):
        name = f"st-{uuid.uuid4().hex[:8]}"
        cloud.secrets[name] = dict(request.env_dict)
        return api_pb2.SecretGetOrCreateResponse(secret_id=name)

    answers = {
        "ClientHello": lambda _: api_pb2.ClientHelloResponse(),
        "AuthTokenGet": lambda _: api_pb2.AuthTokenGetResponse(token=token()),
        "AppGetOrCreate": lambda r: api_pb2.AppGetOrCreateResponse(app_id=f"ap-{r.app_name}"),
        "EnvironmentGetOrCreate": lambda _: api_pb2.EnvironmentGetOrCreateResponse(
            environment_id="en-1", metadata=environment
        ),
        "ImageGetOrCreate": lambda r: api_pb2.ImageGetOrCreateResponse(
            image_id="im-1",
            metadata=api_pb2.ImageMetadata(image_builder_version=r.builder_version),
            result=api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS),
        ),
        "SecretGetOrCreate": secret_created,
        **version_1(cloud),
        **version_2(cloud),
    }
    needs_token = version_2(cloud).keys()
    return service(
        api_grpc.ModalClientBase,
        cloud,
        answers,
        lambda name, metadata: name not in needs_token or metadata["x-modal-auth-token"] == token(),
    )


def result_of(job):
    """Return how a sandbox ended, as Modal tells it; empty while it runs."""
    from modal_proto import api_pb2

    result = api_pb2.GenericResult
    code = job.code()
    if code is None:
        return result()
    if job.ended_by == "timeout":
        return result(status=result.GENERIC_STATUS_TIMEOUT)
    if job.ended_by == "cancel":
        return result(status=result.GENERIC_STATUS_TERMINATED)
    status = result.GENERIC_STATUS_SUCCESS if code == 0 else result.GENERIC_STATUS_FAILURE
    return result(status=status, exitcode=code if code >= 0 else 128 - code)


def both_versions(cloud):
    """Return waiting, terminating and finding by name, which the versions share."""
    from grpclib import GRPCError, Status
    from modal_proto import api_pb2

    def from_name(request):
        name = cloud.named.get(request.sandbox_name)
        if name is None or not cloud.is_there(name):
            raise GRPCError(Status.NOT_FOUND, request.sandbox_name)
        if cloud.jobs[name].code() is not None and not request.include_terminated:
            raise GRPCError(Status.NOT_FOUND, request.sandbox_name)
        return api_pb2.SandboxGetFromNameResponse(sandbox_id=name)

    def known(request):
        if not cloud.knows(request.sandbox_id):
            raise GRPCError(Status.NOT_FOUND, request.sandbox_id)
        return cloud.jobs[request.sandbox_id]

    async def wait(request):
        job = known(request)
        until = time.monotonic() + request.timeout
        while job.code() is None and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return api_pb2.SandboxWaitResponse(result=result_of(job))

    def terminate(request):
        known(request).end("cancel")
        return api_pb2.SandboxTerminateResponse()

    def tags(request):
        return api_pb2.SandboxTagsGetResponse(tags=cloud.tags[request.sandbox_id])

    def listed(request):
        if request.before_timestamp:
            return api_pb2.SandboxListResponse()
        wanted = [(tag.tag_name, tag.tag_value) for tag in request.tags]
        infos = [
            api_pb2.SandboxInfo(id=name, created_at=1.0, tags=cloud.tags[name])
            for name, job in cloud.jobs.items()
            if job.code() is None
            and {(t.tag_name, t.tag_value) for t in cloud.tags[name]} >= set(wanted)
        ]
        return api_pb2.SandboxListResponse(sandboxes=infos)

    return wait, terminate, from_name, tags, listed


def version_1(cloud):
    """Return the procedures of sandboxes with a GPU."""
    from modal_proto import api_pb2

    def create(request):
        env = {}
        for secret in request.definition.secret_ids:
            env.update(cloud.secrets[secret])
        # The client tells the version by the length of the name.
        name = cloud.start(request.definition, env, f"sb-{uuid.uuid4().hex[:22]}")
        cloud.tags[name] = list(request.tags)
        return api_pb2.SandboxCreateResponse(sandbox_id=name)

    def logs(request):
        is_out = request.file_descriptor == api_pb2.FILE_DESCRIPTOR_STDOUT
        text = cloud.jobs[request.sandbox_id].log() if is_out else ""
        items = [api_pb2.TaskLogs(data=text, file_descriptor=request.file_descriptor)]
        return [
            api_pb2.TaskLogsBatch(items=items, entry_id="1"),
            api_pb2.TaskLogsBatch(eof=True),
        ]

    wait, terminate, from_name, tags, _ = both_versions(cloud)
    return {
        "SandboxTagsGet": tags,
        "SandboxGetFromName": from_name,
        "SandboxCreate": create,
        "SandboxGetTaskId": lambda _: api_pb2.SandboxGetTaskIdResponse(task_id="ta-1"),
        "SandboxWait": wait,
        "SandboxGetLogs": logs,
        "SandboxTerminate": terminate,
    }


def version_2(cloud):
    """Return the procedures of sandboxes without a GPU."""
    from modal_proto import api_pb2

    def create(request):
        env = {}
        for source in request.secret_sources:
            env.update(cloud.secrets.get(source.secret_id) or source.env.contents)
        name = cloud.start(request.definition, env, f"sb-{uuid.uuid4().hex}")
        cloud.tags[name] = list(request.tags)
        return api_pb2.SandboxCreateV2Response(sandbox_id=name, task_id=task_of(name))

    def task(request):
        return api_pb2.SandboxGetTaskIdResponse(task_id=task_of(request.sandbox_id))

    def access(_):
        return api_pb2.SandboxGetCommandRouterAccessResponse(jwt=token(), url=cloud.url)

    wait, terminate, from_name, tags, listed = both_versions(cloud)
    return {
        "SandboxListV2": listed,
        "SandboxTagsGetV2": tags,
        "SandboxGetFromNameV2": from_name,
        "SandboxCreateV2": create,
        "SandboxGetTaskIdV2": task,
        "SandboxWaitV2": wait,
        "SandboxGetCommandRouterAccess": access,
        "SandboxTerminateV2": terminate,
    }


def worker(cloud):
    """Return the service that streams what sandboxes of version 2 print."""
    from modal_proto import task_command_router_grpc, task_command_router_pb2

    async def read(request):
        by_task = {task_of(name): job for name, job in cloud.jobs.items()}
        job = by_task[request.task_id]
        while job.code() is None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        is_out = (
            request.file_descriptor == task_command_router_pb2.SANDBOX_STDIO_FILE_DESCRIPTOR_STDOUT
        )
        text = job.log().encode()[request.offset :] if is_out else b""
        # Two messages, since streams arrive in pieces; an empty one is an error to the client.
        half = len(text) // 2
        pieces = [(request.offset, text[:half]), (request.offset + half, text[half:])]
        return [
            task_command_router_pb2.SandboxStdioReadV2Response(data=data, starting_offset=at)
            for at, data in pieces
            if data
        ]

    return service(
        task_command_router_grpc.TaskCommandRouterBase,
        cloud,
        {"SandboxStdioReadV2": read},
        lambda _, metadata: metadata["authorization"] == f"Bearer {token()}",
    )
