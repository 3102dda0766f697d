"""Google's and Azure's object stores on loopback, as far as five verbs of a store need them."""

import json
import re
import threading
from email import message_from_bytes
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.trainer.outer.loopback import LoopbackServer

DATE = "Thu, 01 Jan 2026 00:00:00 GMT"


class Bucket(LoopbackServer):
    """Objects by name. `forgetful` servers ignore preconditions, as some gateways do."""

    def __init__(self, *, is_forgetful=False):
        self.objects = {}
        self.is_forgetful = is_forgetful
        self.lock = threading.Lock()
        super().__init__()

    def create(self, name, data, *, is_exclusive):
        """Write an object; False if it exists and the request forbids that."""
        with self.lock:
            if is_exclusive and name in self.objects and not self.is_forgetful:
                return False
            self.objects[name] = data
            return True

    def starting_with(self, prefix):
        with self.lock:
            return sorted(name for name in self.objects if name.startswith(prefix))


class GoogleStorage(Bucket):
    """The JSON interface of Google Cloud Storage, with one bucket."""

    def serve(self, request, body):
        url = urlsplit(request.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        name = unquote(re.sub(r"^.*/b/bucket/o/?", "", url.path))
        if request.command == "POST":
            self.upload(request, query, body)
        elif not name:
            self.listing(request, query)
        elif name not in self.objects:
            self.refuse(request, 404, "No such object")
        elif request.command == "DELETE":
            del self.objects[name]
            self.answer(request, 204)
        elif query.get("alt") == "media":
            self.answer(request, 200, self.objects[name])
        else:
            self.answer_json(request, self.entry(name))

    def upload(self, request, query, body):
        """Take a multipart upload: the object's name as JSON, then its bytes."""
        kind = request.headers["Content-Type"].encode()
        whole = message_from_bytes(b"Content-Type: " + kind + b"\n\n" + body)
        name = json.loads(whole.get_payload(0).get_payload())["name"]
        # The parser takes bytes that are not text for text: cut the part out by hand.
        boundary = whole.get_boundary().encode()
        data = body.split(b"--" + boundary)[2].partition(b"\n\n")[2].removesuffix(b"\n")
        is_exclusive = query.get("ifGenerationMatch") == "0"
        if not self.create(name, data, is_exclusive=is_exclusive):
            return self.refuse(request, 412, "At least one of the pre-conditions did not hold.")
        return self.answer_json(request, self.entry(name))

    def listing(self, request, query):
        names = self.starting_with(query.get("prefix", ""))
        self.answer_json(request, {"items": [self.entry(name) for name in names]})

    def entry(self, name):
        size = str(len(self.objects[name]))
        return {"name": name, "bucket": "bucket", "size": size, "generation": "1"}

    def refuse(self, request, status, why):
        self.answer_json(request, {"error": {"code": status, "message": why}}, status)


class AzureBlobs(Bucket):
    """The blob service of Azure Storage, with one account and one container."""

    connection = (
        "DefaultEndpointsProtocol=http;AccountName=account;AccountKey=a2V5;"
        "BlobEndpoint={url}/account;"
    )

    @property
    def connection_string(self):
        return self.connection.format(url=self.url)

    def serve(self, request, body):
        url = urlsplit(request.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        name = unquote(url.path.removeprefix("/account/bucket").removeprefix("/"))
        if query.get("comp") == "list":
            self.listing(request, query)
        elif request.command == "PUT":
            is_exclusive = request.headers.get("If-None-Match") == "*"
            if self.create(name, body, is_exclusive=is_exclusive):
                self.answer(request, 201, headers=self.properties())
            else:
                self.refuse(request, 409, "BlobAlreadyExists")
        elif name not in self.objects:
            self.refuse(request, 404, "BlobNotFound")
        elif request.command == "DELETE":
            del self.objects[name]
            self.answer(request, 202)
        else:
            self.read(request, self.objects[name])

    def read(self, request, data):
        """Send a blob, or the range of it that is asked for."""
        asked = request.headers.get("x-ms-range") or request.headers.get("Range")
        headers = [*self.properties(), ("x-ms-blob-type", "BlockBlob")]
        if asked is None or not data:
            if asked is not None:
                return self.refuse(request, 416, "InvalidRange")
            return self.answer(request, 200, data, [*headers, ("Content-Length", len(data))])
        first, last = (int(part) for part in asked.removeprefix("bytes=").split("-"))
        part = data[first : last + 1]
        span = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
        return self.answer(request, 206, part, [*headers, ("Content-Range", span)])

    def listing(self, request, query):
        blobs = "".join(
            f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{DATE}</Last-Modified>"
            f"<Etag>0x1</Etag><Content-Length>{len(self.objects[name])}</Content-Length>"
            "<BlobType>BlockBlob</BlobType></Properties></Blob>"
            for name in self.starting_with(query.get("prefix", ""))
        )
        text = (
            '<?xml version="1.0" encoding="utf-8"?><EnumerationResults '
            f'ServiceEndpoint="{self.url}/account" ContainerName="bucket">'
            f"<Blobs>{blobs}</Blobs><NextMarker/></EnumerationResults>"
        )
        self.answer(request, 200, text.encode(), [("Content-Type", "application/xml")])

    def properties(self):
        return [("ETag", '"0x1"'), ("Last-Modified", DATE), ("x-ms-version", "2026-01-01")]

    def refuse(self, request, status, code):
        text = f'<?xml version="1.0" encoding="utf-8"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'
        headers = [("Content-Type", "application/xml"), ("x-ms-error-code", code)]
        self.answer(request, status, text.encode(), headers)
