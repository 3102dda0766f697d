"""The gate in front of Dagster's web server, which alone would obey any page in any browser.

Dagster executes mutations from GET requests of any origin, under any host name. The gate accepts a
request only if its host is this machine (against DNS rebinding), if it comes from our own pages,
and if it has the token that the server printed at its start.
"""

import hmac
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOKEN = "token"
_HEADERS = {
    "x-frame-options": "SAMEORIGIN",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",
}
_POLICY_VIOLATION = 1008
"""Why a WebSocket is closed, in its own terms."""


class Gate:
    """Dagster's web application behind the gate.

    A browser must send the token once in the address. Then it has it as a cookie.
    """

    def __init__(self, app: ASGIApp, *, port: int, token: str) -> None:
        self._app = app
        self._token = token.encode()
        # Cookies don't know ports: another server of this machine shall not take ours away.
        self._cookie = f"replay-pipeline-{port}"
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}
        self._origins = {f"http://{host}" for host in self._hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, pass on, or refuse."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        asked = HTTPConnection(scope)
        if (
            self._host(asked)
            and scope["type"] == "http"
            and self._knows(asked.query_params.get(TOKEN))
        ):
            await self._let_in(asked)(scope, receive, send)
        elif refusal := self._refusal(asked):
            if scope["type"] == "websocket":
                await receive()
                await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
            else:
                status, why = refusal
                await PlainTextResponse(f"{why}\n", status, _HEADERS)(scope, receive, send)
        else:
            await self._app(scope, receive, _with_headers(send))

    def _refusal(self, asked: HTTPConnection) -> tuple[HTTPStatus, str] | None:
        """Return why a request is not passed on, if it is not."""
        if not self._host(asked):
            return HTTPStatus.MISDIRECTED_REQUEST, "this is not the name of this server"
        origin = asked.headers.get("origin")
        is_own_page = origin in self._origins
        site = asked.headers.get("sec-fetch-site", "none")
        if (origin is not None and not is_own_page) or site not in ("same-origin", "none"):
            return HTTPStatus.FORBIDDEN, "pages of other places may ask nothing here"
        if not self._knows(asked.cookies.get(self._cookie)):
            return HTTPStatus.UNAUTHORIZED, "open the address that `replay-pipeline ui` has printed"
        if asked.scope["type"] == "websocket":
            return None if is_own_page else (HTTPStatus.FORBIDDEN, "not one of our own pages")
        return self._misuse(asked, is_own_page=is_own_page)

    def _misuse(self, asked: HTTPConnection, *, is_own_page: bool) -> tuple[HTTPStatus, str] | None:
        method, path = asked.scope["method"], asked.scope["path"]
        if method in ("GET", "HEAD"):
            if path.startswith("/graphql") and asked.query_params:
                return HTTPStatus.METHOD_NOT_ALLOWED, "questions are asked by POST"
            return None
        if method != "POST":
            return HTTPStatus.METHOD_NOT_ALLOWED, "GET and POST only"
        kind = asked.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not is_own_page or kind != "application/json":
            return HTTPStatus.FORBIDDEN, "only our own pages may change anything, and as JSON"
        return None

    def _host(self, asked: HTTPConnection) -> bool:
        named = asked.headers.getlist("host")
        return len(named) == 1 and named[0].lower() in self._hosts

    def _knows(self, shown: str | None) -> bool:
        return shown is not None and hmac.compare_digest(shown.encode(), self._token)

    def _let_in(self, asked: HTTPConnection) -> RedirectResponse:
        """Keep the token in the browser, and out of its address bar."""
        rest = urlencode([(k, v) for k, v in asked.query_params.multi_items() if k != TOKEN])
        place = f"http://{asked.headers['host']}{asked.url.path}{'?' if rest else ''}{rest}"
        response = RedirectResponse(place, HTTPStatus.SEE_OTHER, _HEADERS)
        response.set_cookie(self._cookie, self._token.decode(), httponly=True, samesite="strict")
        return response


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers: Any = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sending
