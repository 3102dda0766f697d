"""A loopback Hub for dataset repositories, with faults on demand.

It runs in a process of its own and speaks the protocol of the Hugging Face Hub as far as
publishing and loading a dataset needs it: repositories, preupload, LFS upload, atomic commits with
a parent, tags, listing, resolving with ranges, squashing. Uploads go over plain HTTP; the Hub's
chunk store (Xet) is not spoken, so clients set `HF_HUB_DISABLE_XET=1`.

    with HubServer() as hub:
        publish(batches, folder=folder, repo_id="me/pairs", endpoint=hub.url, token=hub.token)
"""

import asyncio
import base64
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

WRITE_TOKEN = "hf_write"
READ_TOKEN = "hf_read"
_LFS_SUFFIXES = (".parquet", ".arrow", ".bin", ".safetensors")
_MAX_REGULAR_BYTES = 10 * 2**20


class HubServer:
    """Starts the Hub in a process of its own, and stops it.

    Args:
        root: folder for uploaded files; by default a temporary one.

    Example:
        >>> with HubServer() as hub:
        ...     hub.repository("me/pairs") is None
        True
    """

    token = WRITE_TOKEN
    """A token that may write."""
    read_token = READ_TOKEN
    """A token that may only read."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root
        self._process: subprocess.Popen[bytes] | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self.url = ""

    def __enter__(self) -> Self:
        if self._root is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="hub-")
        root = self._root or Path(self._temporary.name if self._temporary else ".")
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(128)  # connections wait here until the process serves them
            port = listener.getsockname()[1]
            descriptor = listener.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(root), str(descriptor), str(port)],
                pass_fds=[descriptor],
                stdin=subprocess.PIPE,  # closes when this process ends, however it ends
            )
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        if self._temporary is not None:
            self._temporary.cleanup()

    def environment(self) -> dict[str, str]:
        """Variables with which a process finds this Hub."""
        names = {"HF_ENDPOINT": self.url, "HF_TOKEN": self.token}
        return {**names, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}

    def fail(
        self,
        match: str,
        *,
        times: int = 1,
        status: int = 503,
        is_done: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Let the next requests fail whose `METHOD /path` holds the pattern.

        Args:
            match: regular expression.
            times: how many requests fail.
            status: status of the answer; 0 closes the connection without any.
            is_done: whether the request takes effect all the same, and only its answer is lost.
            headers: headers of the answer, e.g. `Retry-After`.
        """
        fault = {"match": match, "times": times, "status": status, "is_done": is_done}
        self._control("POST", "/_control/faults", {**fault, "headers": dict(headers or {})})

    def heal(self) -> None:
        """Take back every fault that is still to come."""
        self._control("POST", "/_control/heal")

    def repository(self, repo_id: str) -> dict[str, Any] | None:
        """A repository as it is: `private`, `commits` (newest first), `files` of the head, `tags`."""
        return self._control("GET", f"/_control/repository/{repo_id}")

    def requests(self) -> list[str]:
        """Every request so far, as `METHOD /path status`."""
        return self._control("GET", "/_control/requests")

    def _control(self, method: str, path: str, content: Any = None) -> Any:
        address = urlsplit(self.url)
        connection = HTTPConnection(address.hostname or "", address.port, timeout=60)
        try:
            body = None if content is None else json.dumps(content)
            connection.request(method, path, body, {"Content-Type": "application/json"})
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()


class RefusalError(Exception):
    """An answer that is an error, with the code that clients tell errors apart by."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass
class StoredFile:
    """A file of a commit: in the commit itself, or in the LFS store under its sha256."""

    size: int
    oid: str
    data: bytes | None = None
    lfs_sha: str | None = None

    def entry(self, path: str) -> dict[str, Any]:
        """The file as listings show it."""
        entry: dict[str, Any] = {"type": "file", "path": path, "size": self.size, "oid": self.oid}
        if self.lfs_sha:
            entry["lfs"] = {"oid": self.lfs_sha, "size": self.size, "pointerSize": 132}
        return entry


@dataclass
class Commit:
    """One version of all files."""

    sha: str
    parent: str | None
    title: str
    files: dict[str, StoredFile]


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@dataclass
class Repository:
    """A dataset repository: commits, branches, tags."""

    repo_id: str
    is_private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def resolve(self, revision: str) -> Commit:
        """The commit of a branch, tag or sha."""
        sha = self.refs.get(revision) or self.tags.get(revision) or revision
        if sha not in self.commits:
            raise RefusalError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return self.commits[sha]

    def commit(self, ref: str, title: str, parent: str | None, files: dict[str, StoredFile]) -> str:
        """Put a new version on a branch."""
        listing = sorted((path, file.oid) for path, file in files.items())
        text = json.dumps([parent, title, listing, len(self.commits)])
        sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        self.commits[sha] = Commit(sha, parent, title, files)
        self.refs[ref] = sha
        return sha

    def history(self, revision: str = "main") -> list[Commit]:
        """Commits of a branch, newest first."""
        commits, sha = [], self.resolve(revision).sha
        while sha:
            commits.append(self.commits[sha])
            sha = self.commits[sha].parent or ""
        return commits


@dataclass
class Fault:
    """Requests that are to fail."""

    match: str
    times: int
    status: int
    is_done: bool
    headers: dict[str, str]


class Hub:
    """The state of the server and its answers."""

    def __init__(self, root: Path, url: str) -> None:
        self._root, self._url = root, url
        self._repositories: dict[str, Repository] = {}
        self._faults: list[Fault] = []
        self._requests: list[str] = []
        root.mkdir(parents=True, exist_ok=True)

    async def answer(self, request: Request) -> Response:
        """Every request comes through here."""
        path = request.scope["raw_path"].decode()
        line = f"{request.method} {unquote(path)}"
        body = await request.body()
        if path.startswith("/_control/"):
            return self._control(path, body)
        fault = next((f for f in self._faults if f.times and re.search(f.match, line)), None)
        if fault is not None:
            fault.times -= 1
            if fault.is_done:
                self._answer(request, path, body)
            self._requests.append(f"{line} fault {fault.status}")
            if fault.status == 0:
                return _Cut()
            return JSONResponse({"error": "injected"}, fault.status, headers=fault.headers)
        response = self._answer(request, path, body)
        self._requests.append(f"{line} {response.status_code}")
        return response

    def _answer(self, request: Request, path: str, body: bytes) -> Response:
        try:
            return self._route(request, path, body)
        except RefusalError as refusal:
            headers = {"X-Error-Code": refusal.code, "X-Error-Message": str(refusal)}
            return JSONResponse({"error": str(refusal)}, refusal.status, headers=headers)

    def _control(self, path: str, body: bytes) -> Response:
        if path == "/_control/faults":
            self._faults.append(Fault(**json.loads(body)))
            return JSONResponse(None)
        if path == "/_control/heal":
            self._faults.clear()
            return JSONResponse(None)
        if path == "/_control/requests":
            return JSONResponse(self._requests)
        repository = self._repositories.get(path.removeprefix("/_control/repository/"))
        if repository is None:
            return JSONResponse(None)
        commits = [{"sha": c.sha, "title": c.title} for c in repository.history()]
        files = {p: f.lfs_sha or f.oid for p, f in repository.resolve("main").files.items()}
        told = {"private": repository.is_private, "commits": commits, "files": files}
        return JSONResponse(told | {"tags": repository.tags})

    # Routes

    def _route(self, request: Request, path: str, body: bytes) -> Response:
        if path.startswith("/_lfs/"):
            return self._put_lfs(path.removeprefix("/_lfs/"), body)
        if path == "/api/validate-yaml":
            return _validate_card(json.loads(body)["content"])
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token not in ("", WRITE_TOKEN, READ_TOKEN):
            raise RefusalError(401, "", "Invalid credentials in Authorization header")
        if path == "/api/whoami-v2":
            return JSONResponse({"type": "user", "name": "me", "orgs": []})
        if path == "/api/repos/create":
            _may_write(token)
            return self._create(json.loads(body))
        parts = [unquote(part) for part in path.strip("/").split("/")]
        return self._of_repository(request, parts, body, token)

    def _of_repository(
        self, request: Request, parts: list[str], body: bytes, token: str
    ) -> Response:
        # Models live beside datasets; their paths have no word for it outside the API.
        if parts[:2] == ["api", "models"]:
            parts[1] = "datasets"
        elif parts[0] not in ("api", "datasets"):
            parts.insert(0, "datasets")
        if parts[:2] == ["api", "datasets"] and len(parts) >= 4:
            repository = self._find("/".join(parts[2:4]), token)
            return self._api(request, repository, parts[4:], body, token)
        if parts[0] == "datasets" and len(parts) >= 4:
            repository = self._find("/".join(parts[1:3]).removesuffix(".git"), token)
            if parts[3] == "resolve":
                return self._download(request, repository, parts[4], "/".join(parts[5:]))
            if parts[3:] == ["info", "lfs", "objects", "batch"]:
                _may_write(token)
                return self._lfs_batch(json.loads(body))
        raise RefusalError(404, "", f"no route {request.method} {request.url.path}")

    def _find(self, repo_id: str, token: str) -> Repository:
        repository = self._repositories.get(repo_id)
        if repository is None or (repository.is_private and not token):
            raise RefusalError(404 if token else 401, "RepoNotFound", "Repository not found")
        return repository

    def _create(self, wanted: Mapping[str, Any]) -> Response:
        repo_id = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        url = f"{self._url}/datasets/{repo_id}"
        if wanted.get("type") not in (None, "model", "dataset"):
            raise RefusalError(400, "", "only models and datasets live here")
        if repo_id in self._repositories:
            return JSONResponse({"error": "You already created this dataset repo", "url": url}, 409)
        is_private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
        repository = self._repositories[repo_id] = Repository(repo_id, is_private)
        attributes = b"*.parquet filter=lfs diff=lfs merge=lfs -text\n"
        file = StoredFile(len(attributes), _git_oid(attributes), data=attributes)
        repository.commit("main", "initial commit", None, {".gitattributes": file})
        return JSONResponse({"url": url, "name": repo_id})

    def _api(
        self, request: Request, repository: Repository, rest: list[str], body: bytes, token: str
    ) -> Response:
        verb = rest[0] if rest else "revision"
        revision = rest[1] if len(rest) > 1 else "main"
        if request.method == "GET":
            readers: dict[str, Callable[[], Any]] = {
                "revision": lambda: _info(repository, revision),
                "tree": lambda: _tree(repository, revision, "/".join(rest[2:]), request),
                "lfs-files": lambda: self._lfs_files(repository),
            }
            if verb in readers:
                return JSONResponse(readers[verb]())
        elif verb == "paths-info":
            return JSONResponse(_paths_info(repository, revision, body))
        else:
            _may_write(token)
            return self._change(request, repository, rest, body)
        raise RefusalError(404, "", f"no route {request.method} {request.url.path}")

    def _change(
        self, request: Request, repository: Repository, rest: list[str], body: bytes
    ) -> Response:
        verb, name = rest[0], rest[1] if len(rest) > 1 else "main"
        content = json.loads(body) if body and verb != "commit" else {}
        match request.method, verb:
            case "POST", "preupload":
                return JSONResponse(_preupload(repository.resolve(name), content))
            case "POST", "commit":
                return self._commit(repository, name, body)
            case "POST", "tag":
                if content["tag"] in repository.tags:
                    raise RefusalError(409, "", "Tag exists already")
                repository.tags[content["tag"]] = repository.resolve(name).sha
            case "POST", "super-squash":
                head = repository.resolve(name)
                repository.commits.clear()
                repository.commit(name, "Super-squash", None, head.files)
                repository.tags.clear()
            case "POST", "lfs-files":
                for oid in content["deletions"]["sha"]:
                    (self._root / oid).unlink(missing_ok=True)
            case _:
                raise RefusalError(404, "", f"no route {request.method} {request.url.path}")
        return JSONResponse({})

    # Uploads

    def _put_lfs(self, oid: str, body: bytes) -> Response:
        if hashlib.sha256(body).hexdigest() != oid:
            raise RefusalError(400, "", "sha256 mismatch")
        (self._root / oid).write_bytes(body)
        return JSONResponse({})

    def _lfs_batch(self, wanted: Mapping[str, Any]) -> Response:
        objects = []
        for item in wanted["objects"]:
            answer = {"oid": item["oid"], "size": item["size"]}
            if not (self._root / item["oid"]).exists():
                href = f"{self._url}/_lfs/{item['oid']}"
                answer["actions"] = {"upload": {"href": href, "header": {}}}
            objects.append(answer)
        return JSONResponse({"transfer": "basic", "objects": objects})

    def _lfs_files(self, repository: Repository) -> list[dict[str, Any]]:
        files = {
            file.lfs_sha: {"fileOid": file.lfs_sha, "oid": file.lfs_sha, "filename": path}
            | {"size": file.size, "pushedAt": _DATE, "ref": "main"}
            for commit in repository.commits.values()
            for path, file in commit.files.items()
            if file.lfs_sha
        }
        return list(files.values())

    def _commit(self, repository: Repository, revision: str, body: bytes) -> Response:
        lines = [json.loads(line) for line in body.splitlines() if line.strip()]
        header = lines[0]["value"]
        head = repository.resolve(revision)
        if (parent := header.get("parentCommit")) and parent != head.sha:
            raise RefusalError(
                412, "", "A commit has happened since. Please refresh and try again."
            )
        files = dict(head.files)
        for line in lines[1:]:
            self._apply(files, line["key"], line["value"])
        sha = repository.commit(revision, header["summary"], head.sha, files)
        url = f"{self._url}/datasets/{repository.repo_id}/commit/{sha}"
        return JSONResponse({"commitOid": sha, "commitUrl": url})

    def _apply(self, files: dict[str, StoredFile], key: str, value: Mapping[str, Any]) -> None:
        path = value["path"]
        if key == "file":
            data = base64.b64decode(value["content"])
            files[path] = StoredFile(len(data), _git_oid(data), data=data)
        elif key == "lfsFile":
            stored = self._root / value["oid"]
            if not stored.exists():
                raise RefusalError(400, "", f"LFS object of {path} is missing")
            pointer = f"oid sha256:{value['oid']}".encode()
            size = stored.stat().st_size
            files[path] = StoredFile(size, _git_oid(pointer), lfs_sha=value["oid"])
        elif key in ("deletedFile", "deletedFolder"):
            gone = [p for p in files if p == path or p.startswith(path.rstrip("/") + "/")]
            if not gone:
                raise RefusalError(404, "EntryNotFound", f"{path} does not exist")
            for name in gone:
                del files[name]

    # Downloads

    def _download(
        self, request: Request, repository: Repository, revision: str, path: str
    ) -> Response:
        commit = repository.resolve(revision)
        if path not in commit.files:
            raise RefusalError(404, "EntryNotFound", f"{path} does not exist")
        file = commit.files[path]
        data = file.data
        if data is None:
            stored = self._root / (file.lfs_sha or "")
            if not stored.exists():
                raise RefusalError(404, "EntryNotFound", f"{path} was deleted for good")
            data = stored.read_bytes()
        etag = f'"{file.lfs_sha or file.oid}"'
        headers = {"ETag": etag, "X-Repo-Commit": commit.sha, "Accept-Ranges": "bytes"}
        if file.lfs_sha:
            headers |= {"X-Linked-Etag": etag, "X-Linked-Size": str(len(data))}
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", "")):
            start, last = int(wanted[1]), min(int(wanted[2] or len(data) - 1), len(data) - 1)
            headers["Content-Range"] = f"bytes {start}-{last}/{len(data)}"
            return Response(data[start : last + 1], 206, headers)
        return Response(data, 200, headers)


_DATE = "2026-01-01T00:00:00.000Z"


class _Cut(Response):
    """Promises an answer and closes the connection before it is there."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"1000"), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{", "more_body": False})


def _may_write(token: str) -> None:
    if token == READ_TOKEN:
        raise RefusalError(403, "", "Forbidden: this token may only read")
    if token != WRITE_TOKEN:
        raise RefusalError(401, "", "Invalid username or password.")


def _validate_card(content: str) -> Response:
    errors = []
    if match := re.match(r"---\s*\n(.*?)\n---", content, re.DOTALL):
        try:
            if not isinstance(yaml.safe_load(match[1]), dict):
                errors.append({"message": "the metadata is no mapping"})
        except yaml.YAMLError as error:
            errors.append({"message": str(error)})
    return JSONResponse({"errors": errors, "warnings": []}, 400 if errors else 200)


def _info(repository: Repository, revision: str) -> dict[str, Any]:
    commit = repository.resolve(revision)
    return {
        "_id": repository.repo_id, "id": repository.repo_id, "author": repository.repo_id.split("/")[0],
        "sha": commit.sha, "private": repository.is_private, "gated": False, "disabled": False, "tags": [],
        "downloads": 0, "likes": 0, "createdAt": _DATE, "lastModified": _DATE,
        "siblings": [{"rfilename": path} for path in sorted(commit.files)],
    }  # fmt: skip


def _tree(
    repository: Repository, revision: str, folder: str, request: Request
) -> list[dict[str, Any]]:
    files = repository.resolve(revision).files
    prefix = f"{folder}/" if folder else ""
    is_deep = request.query_params.get("recursive", "").lower() in ("true", "1")
    entries: list[dict[str, Any]] = []
    folders: set[str] = set()
    for path in sorted(files):
        if not path.startswith(prefix):
            continue
        parts = path.removeprefix(prefix).split("/")
        folders |= {prefix + "/".join(parts[:n]) for n in range(1, len(parts) if is_deep else 2)}
        if is_deep or len(parts) == 1:
            entries.append(files[path].entry(path))
    folders -= set(files)
    if folder and not entries and not folders:
        raise RefusalError(404, "EntryNotFound", f"{folder} does not exist")
    return [*map(_folder, sorted(folders)), *entries]


def _folder(path: str) -> dict[str, Any]:
    return {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}


def _paths_info(repository: Repository, revision: str, body: bytes) -> list[dict[str, Any]]:
    files = repository.resolve(revision).files
    if body[:1] == b"{":
        paths: Iterable[str] = json.loads(body)["paths"]
    else:
        paths = parse_qs(body.decode()).get("paths", [])
    entries = []
    for path in [paths] if isinstance(paths, str) else paths:
        if path in files:
            entries.append(files[path].entry(path))
        elif any(name.startswith(f"{path}/") for name in files):
            entries.append(_folder(path))
    return entries


def _preupload(commit: Commit, wanted: Mapping[str, Any]) -> dict[str, Any]:
    files = []
    for item in wanted["files"]:
        is_lfs = item["path"].endswith(_LFS_SUFFIXES) or item["size"] > _MAX_REGULAR_BYTES
        entry = {"path": item["path"], "uploadMode": "lfs" if is_lfs else "regular"}
        entry["shouldIgnore"] = False
        if stored := commit.files.get(item["path"]):
            entry["oid"] = stored.lfs_sha or stored.oid
        files.append(entry)
    return {"files": files, "commitOid": commit.sha}


def _serve(root: Path, descriptor: int, port: int) -> None:
    hub = Hub(root, f"http://127.0.0.1:{port}")
    methods = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH"]
    app = Starlette(routes=[Route("/{path:path}", hub.answer, methods=methods)])
    # A client keeps its connections while it works on what came. With the 5 s of uvicorn's default
    # the server can close one in the moment a busy client takes it up again.
    config = uvicorn.Config(
        app, log_level="critical", access_log=False, lifespan="off", timeout_keep_alive=3600
    )
    listener = socket.socket(fileno=descriptor)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
