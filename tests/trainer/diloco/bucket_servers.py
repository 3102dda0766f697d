"""Google's object store on loopback, as far as five verbs of a store need them."""

import json
import re
import threading
from email import message_from_bytes
from urllib.parse import parse_qs, unquote, urlsplit

from tests.loopback import LoopbackServer

DATE = "Thu, 01 Jan 2026 00:00:00 GMT"


class GoogleStorage(LoopbackServer):
    """The JSON interface of Google Cloud Storage, with one bucket of objects by name.

    `forgetful` servers ignore preconditions, as some gateways do.
    """

    def __init__(self):
        self.objects, self.is_forgetful = {}, False
        self.lock = threading.Lock()
        super().__init__()

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
        is_exclusive = query.get("ifGenerationMatch") == "0" and not self.is_forgetful
        with self.lock:
            if is_exclusive and name in self.objects:
                return self.refuse(request, 412, "At least one of the pre-conditions did not hold.")
            self.objects[name] = data
        return self.answer_json(request, self.entry(name))

    def listing(self, request, query):
        with self.lock:
            names = sorted(n for n in self.objects if n.startswith(query.get("prefix", "")))
        self.answer_json(request, {"items": [self.entry(name) for name in names]})

    def entry(self, name):
        size = str(len(self.objects[name]))
        return {"name": name, "bucket": "bucket", "size": size, "generation": "1"}

    def refuse(self, request, status, why):
        self.answer_json(request, {"error": {"code": status, "message": why}}, status)
