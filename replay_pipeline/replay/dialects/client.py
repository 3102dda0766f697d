"""The one module that speaks HTTP. It sends a request once, and reports the outcome.

It never retries and never gives up early, because an aborted call still costs money. It catches the
errors of httpx. A `Failure` says whether the request never left, or left with an unknown outcome.

It is an httpx client with the transport of `httpx-aiohttp`, because httpx's own pool gets slower
with more connections.
"""

import asyncio
import functools
import json
import logging
import math
import re
import ssl
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http.cookiejar import CookieJar, DefaultCookiePolicy
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from pydantic import SecretStr

from replay_pipeline.errors import (
    ConfigError,
    TeacherAuthError,
    TeacherResponseError,
    TeacherTimeoutError,
)
from replay_pipeline.replay.dialects.base import Dialect
from replay_pipeline.replay.dialects.prices import nano
from replay_pipeline.replay.dialects.replies import Answer, Failure, generation_of, read_reply
from replay_pipeline.storage.processes import environment


class _OnFirstUse:
    """A module that is imported when an attribute is first read.

    `importlib.util.LazyLoader` doesn't work here: code that walks through `sys.modules`, as
    `inspect` does, would load the module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        """Return what the module has. Raises what importing it raises."""
        return getattr(import_module(self._name), attribute)


if TYPE_CHECKING:
    import httpx
    import httpx_aiohttp
else:
    httpx = _OnFirstUse("httpx")
    httpx_aiohttp = _OnFirstUse("httpx_aiohttp")

logger = logging.getLogger(__name__)

T = TypeVar("T")

_KEEPALIVE_S = 20.0
_CONNECT_S = 15.0
_PIECE_BYTES = 1 << 18
_MOST_BYTES = 64 << 20
"""A longer reply is not read to its end."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_POLL_S = 0.1
_UPLOAD_S = 60.0
_LOOK_S = 30.0
"""A list of models, or the record of a call, comes within so long."""
_LEAST_BYTES_PER_S = 50_000
"""An endpoint that has not taken a request after so long, at so slow a pace, takes none."""
_LEAST_KEY = 16
_LEAST_KEY_BITS = 48
"""What is shorter, or holds less, is a word like `ollama` or `EMPTY`, and no secret."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The outcome of one request, with the bytes of the reply."""

    outcome: Answer | Failure
    body: bytes = b""
    has_cache: bool = False
    """The reply says whether it came from the router's response cache, so the router has one."""
    sent_at: datetime | None = None
    """When the last byte left, or None if it never did."""


class Client:
    """Connections to endpoints, shared by all teachers of a run.

    After `stop` is set, calls in flight have `settle_s` seconds to end. Then they are given up.
    """

    def __init__(
        self,
        *,
        max_connections: int = 512,
        stop: threading.Event | None = None,
        settle_s: float = 60.0,
    ) -> None:
        self._max_connections = max_connections
        self._stop = stop
        self._settle_s = settle_s
        self._has_given_up = False
        self._limits: set[asyncio.Timeout] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._calls: dict[str | None, httpx.AsyncClient] = {}
        self._proxies: dict[str, str | None] = {}

    async def __aenter__(self) -> "Client":
        if self._stop is not None:
            self._watcher = asyncio.create_task(self._watch(self._stop))
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        for calls in self._calls.values():
            await calls.aclose()
        await asyncio.sleep(0)  # connections end in the next turn of the loop

    async def _watch(self, stop: threading.Event) -> None:
        while not stop.is_set():  # noqa: ASYNC110 (other threads set it)
            await asyncio.sleep(_POLL_S)
        await asyncio.sleep(self._settle_s)
        self.give_up()

    def give_up(self) -> None:
        """End every open call now. Their costs are then unknown."""
        self._has_given_up = True
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    async def complete(
        self,
        base_url: str,
        body: bytes,
        *,
        dialect: Dialect,
        headers: Mapping[str, str],
        key: SecretStr | None,
        timeout_s: float,
        on_sent: Callable[[], None] | None = None,
    ) -> Reply:
        """Send one chat completion, exactly once, and wait at most `timeout_s` after its last byte.

        `on_sent` is called when the last byte leaves.
        """
        sending = _Sending(body, timeout_s, on_sent)
        url = base_url.rstrip("/") + dialect.path
        try:
            status, content = await self._send(
                "POST", url, sending, {**headers, **dialect.authorization(key)}
            )
        except Exception as error:  # noqa: BLE001 (the transport lets errors of its own through)
            return Reply(self._lost(error, sending, base_url), sent_at=sending.sent_at)
        content = _without(key, content.removeprefix(_BYTE_ORDER_MARK))
        has_cache = "x-openrouter-cache-status" in sending.received
        outcome = read_reply(status, sending.received, content, request=body)
        return Reply(outcome, content, has_cache, sending.sent_at)

    @asynccontextmanager
    async def _limited(self, seconds: float) -> AsyncIterator[asyncio.Timeout]:
        """Limit a call in all, however much or little comes back, and let `give_up` end it."""
        async with asyncio.timeout(0 if self._has_given_up else seconds) as limit:
            self._limits.add(limit)
            try:
                yield limit
            finally:
                self._limits.discard(limit)

    async def _send(
        self, method: str, url: str, sending: "_Sending", headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        """Send one request and read the reply, both within its limits."""
        calls = self._calls_to(url)
        async with self._limited(sending.upload_s) as limit:
            sending.limit = limit
            if sending.body:
                headers = {**headers, "content-length": str(len(sending.body))}
            else:
                sending.is_over()
            request = calls.build_request(
                method,
                url,
                content=sending if sending.body else None,
                headers=headers,
                timeout=_timeout(sending.timeout_s),
            )
            response = await calls.send(request, stream=True)
            try:
                # Looking a header up in those of httpx takes as long as all of them do here.
                sending.received = {
                    name.decode("latin-1").lower(): value.decode("latin-1")
                    for name, value in response.headers.raw
                }
                return response.status_code, await _read_all(response)
            finally:
                await response.aclose()
                _forget_cookies(calls)

    def _calls_to(self, url: str) -> "httpx.AsyncClient":
        proxy = self._proxy_of(url)
        if proxy not in self._calls:
            # It logs the words beside each status, in which an endpoint may repeat the key.
            logging.getLogger("httpx").setLevel(logging.WARNING)
            self._calls[proxy] = httpx.AsyncClient(
                transport=transport(self._max_connections, proxy),
                # Cookies of an endpoint would tie calls to each other.
                cookies=CookieJar(policy=DefaultCookiePolicy(allowed_domains=())),
                trust_env=False,
            )
        return self._calls[proxy]

    def check_way(self, base_url: str) -> None:
        """Check that an endpoint can be spoken to from here, before anything is sent.

        Raises:
            ConfigError: the proxy of the environment, or its certificates, can't be used.
        """
        self._proxy_of(base_url)
        _trusted()

    def _proxy_of(self, url: str) -> str | None:
        """Name the proxy of the environment for an endpoint; none for plain http, as on loopback.

        Raises:
            ConfigError: it isn't an HTTP proxy.
        """
        place = urlsplit(url)
        if place.netloc not in self._proxies:
            is_direct = place.scheme != "https" or proxy_bypass(place.hostname or "")
            known = getproxies()
            proxy = None if is_direct else known.get("https", known.get("all"))
            if proxy and not proxy.startswith(("http://", "https://")):
                kind = proxy.partition("://")[0]
                raise ConfigError(
                    f"the proxy of the environment speaks {kind}, and only http is spoken here: set "
                    "HTTPS_PROXY to an http:// address, or NO_PROXY to the endpoint's host"
                )
            self._proxies[place.netloc] = proxy
        return self._proxies[place.netloc]

    def _lost(self, error: Exception, sending: "_Sending", base_url: str) -> Failure:
        """Judge a call that ended without a reply: harmless only if the request never left whole."""
        why = _words(error.__cause__ or error)
        if sending.sent_at is None:
            what = "stopped taking the request" if sending.is_begun else "cannot be reached"
            return Failure(
                "unreachable",
                f"{base_url} {what}: check its address and the network ({why})",
                is_retryable=not isinstance(error, httpx.InvalidURL | httpx.UnsupportedProtocol),
            )
        if self._has_given_up and isinstance(error, TimeoutError):
            code, what = "given_up", f"no reply within {self._settle_s:g} s of the stop"
        elif isinstance(error, TimeoutError | httpx.ReadTimeout):
            code, what = "no_reply", f"no whole reply within {sending.timeout_s:g} s"
        else:
            code = "connection_lost"
            what = f"the connection broke before the reply was complete ({why})"
        return Failure(
            code,
            f"{what}; the call may have been paid for",
            is_retryable=True,
            may_be_paid=True,
            generation_id=generation_of(sending.received),
        )

    async def models(
        self, base_url: str, key: SecretStr | None = None, *, dialect: Dialect | None = None
    ) -> list[dict[str, Any]]:
        """Return the models that an endpoint serves, with prices where it lists them.

        Raises:
            TeacherAuthError: the endpoint rejected the key.
            TeacherTimeoutError: the endpoint can't be reached.
            TeacherResponseError: its answer isn't a list of models.
        """
        headers = (dialect or Dialect()).authorization(key)
        reply = await self._get(f"{base_url.rstrip('/')}/models", key, headers=headers)
        models = reply.get("data")
        if not isinstance(models, list):
            raise TeacherResponseError(f"{base_url}/models: the answer is not a list of models")
        return [model for model in models if isinstance(model, dict)]

    async def generation_cost(
        self, base_url: str, generation_id: str, key: SecretStr | None
    ) -> int | None:
        """Return the cost of an earlier call in nano-dollars, or `None` if it is unknown."""
        url = f"{base_url.rstrip('/')}/generation?id={generation_id}"
        try:
            data = (await self._get(url, key)).get("data")
        except (TeacherAuthError, TeacherTimeoutError, TeacherResponseError) as error:
            logger.warning("the cost of %s is not known: %s", generation_id, error)
            return None
        cost = data.get("total_cost") if isinstance(data, dict) else None
        return nano(round(cost, 12)) if isinstance(cost, int | float) and cost >= 0 else None

    async def _get(
        self,
        url: str,
        key: SecretStr | None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        headers = {
            "accept": "application/json",
            "content-type": "application/json",
            **(Dialect().authorization(key) if headers is None else headers),
        }
        sending = _Sending(b"", _LOOK_S)
        try:
            status, content = await self._send("GET", url, sending, headers)
            reply = json.loads(content)
        except ConfigError:
            raise
        except ValueError as error:
            raise TeacherResponseError(f"{url}: the answer is not JSON") from error
        except Exception as error:
            why = _words(error.__cause__ or error)
            raise TeacherTimeoutError(f"{url}: cannot be reached ({why})") from error
        if status in (401, 403):
            raise TeacherAuthError(f"{url}: the key was rejected ({status})")
        if status >= 400 or not isinstance(reply, dict):
            raise TeacherResponseError(f"{url}: answered {status}")
        return reply


class _Sending:
    """A request on its way: what is sent, when its last byte left, and how long it may take."""

    def __init__(
        self, body: bytes, timeout_s: float, on_sent: Callable[[], None] | None = None
    ) -> None:
        self.body = body
        self.on_sent = on_sent
        self.timeout_s = timeout_s
        self.upload_s = min(timeout_s, _UPLOAD_S + len(body) / _LEAST_BYTES_PER_S)
        self.limit: asyncio.Timeout | None = None
        self.received: Mapping[str, str] = {}
        self.is_begun = False
        self.sent_at: datetime | None = None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield a body of megabytes a little at a time, so that the loop can do other things."""
        self.is_begun = True
        for start in range(0, len(self.body), _PIECE_BYTES):
            if start + _PIECE_BYTES >= len(self.body):
                self.is_over()
            yield self.body[start : start + _PIECE_BYTES]

    def is_over(self) -> None:
        """Note that the last byte leaves now: from here on counts how long the call may take."""
        self.sent_at = datetime.now(UTC)
        if self.on_sent is not None:
            self.on_sent()
        if self.limit is not None and not self.limit.expired():
            self.limit.reschedule(asyncio.get_running_loop().time() + self.timeout_s)


@functools.lru_cache(maxsize=64)
def _timeout(timeout_s: float) -> "httpx.Timeout":
    return httpx.Timeout(connect=_CONNECT_S, read=timeout_s, write=None, pool=None)


def transport(max_connections: int, proxy: str | None) -> "httpx.AsyncBaseTransport":
    """Return the transport of an httpx client."""
    return httpx_aiohttp.AiohttpTransport(
        verify=_trusted(),
        limits=httpx.Limits(max_connections=max_connections, keepalive_expiry=_KEEPALIVE_S),
        proxy=httpx.Proxy(proxy) if proxy else None,
    )


def _forget_cookies(calls: "httpx.AsyncClient") -> None:
    """Throw away the cookies that the transport keeps beside the client's."""
    session = getattr(calls._transport, "client", None)
    if session is not None:
        session.cookie_jar.clear()


async def _read_all(response: "httpx.Response") -> bytes:
    pieces = bytearray()
    async for piece in response.aiter_bytes():
        pieces += piece
        if len(pieces) > _MOST_BYTES:
            raise ValueError(f"the reply has more than {_MOST_BYTES >> 20} MiB")
    return bytes(pieces)


@functools.cache
def _trusted() -> ssl.SSLContext:
    """Return the system's certificates, read once: that takes longer than a call.

    Those of `REQUESTS_CA_BUNDLE` count too, as where a company's proxy signs with its own.

    Raises:
        ConfigError: the bundle can't be read.
    """
    context = ssl.create_default_context()
    if bundle := environment("REQUESTS_CA_BUNDLE"):
        try:
            context.load_verify_locations(
                **{"capath" if Path(bundle).is_dir() else "cafile": bundle}
            )
        except OSError as error:
            raise ConfigError(f"REQUESTS_CA_BUNDLE={bundle}: not readable ({error})") from error
    return context


def run_apart(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end in a new event loop, even if one is already running."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="replay") as pool:
        return pool.submit(asyncio.run, work).result()


def _without(key: SecretStr | None, sent: bytes) -> bytes:
    """Return what an endpoint sent, without the key: some repeat it in their error messages."""
    pattern = None if key is None else _token_of(key.get_secret_value())
    return sent if pattern is None else pattern.sub(b"<API KEY>", sent)


@functools.lru_cache(maxsize=64)
def _token_of(key: str) -> re.Pattern[bytes] | None:
    """Match a key where it stands alone; `None` where it is a word, which answers may hold."""
    counts = Counter(key).values()
    bits = -sum(n * math.log2(n / len(key)) for n in counts)
    is_mixed = any(c.isdigit() for c in key) or key not in (key.lower(), key.upper())
    if len(key) < _LEAST_KEY or bits < _LEAST_KEY_BITS or not is_mixed:
        return None
    return re.compile(rb"(?<![\w-])" + re.escape(key.encode()) + rb"(?![\w-])")


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}{': ' + str(error) if str(error) else ''}"[:200]
