"""The one module that speaks HTTP: sends a request once, and says what became of it.

It never retries and never gives up early: an aborted call is paid for. Foreign errors end here; a
`Failure` tells apart a request that never left from one whose outcome is unknown.

It goes through aiohttp, whose pool costs a third of the CPU time of httpx's and does not grow with
the connections it holds.
"""

import asyncio
import functools
import json
import logging
import ssl
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from pydantic import SecretStr

from replay_pipeline.errors import TeacherAuthError, TeacherResponseError, TeacherTimeoutError
from replay_pipeline.lazy import OnFirstUse
from replay_pipeline.replay.dialects import Dialect
from replay_pipeline.replay.prices import nano
from replay_pipeline.replay.replies import Answer, Failure, generation_of, read_reply

if TYPE_CHECKING:
    import aiohttp
else:
    aiohttp = OnFirstUse("aiohttp")

logger = logging.getLogger(__name__)

T = TypeVar("T")

_KEEPALIVE_S = 20.0
_CONNECT_S = 15.0
_PIECE_BYTES = 1 << 18
_MOST_BYTES = 64 << 20
"""A longer reply is not read to its end."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of one request, and the bytes that came back."""

    outcome: Answer | Failure
    body: bytes = b""
    has_cache: bool = False
    """The router said whether its response cache had the answer, so it keeps one."""


class Client:
    """Connections to endpoints, shared by all teachers of a run."""

    def __init__(self, *, max_connections: int = 512) -> None:
        self._max_connections = max_connections
        self._proxies: dict[str, str | None] = {}

    async def __aenter__(self) -> "Client":
        self._calls = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=self._max_connections, keepalive_timeout=_KEEPALIVE_S, ssl=_trusted()
            ),
            # Cookies of an endpoint would tie calls to each other.
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._calls.close()

    async def complete(
        self,
        base_url: str,
        body: bytes,
        *,
        dialect: Dialect,
        headers: Mapping[str, str],
        key: SecretStr | None,
        timeout_s: float,
    ) -> Reply:
        """Send one chat completion, exactly once."""
        sent = {**headers, **dialect.authorization(key), "content-length": str(len(body))}
        received: Mapping[str, str] = {}
        try:
            async with self._calls.post(
                base_url.rstrip("/") + dialect.path,
                data=_pieces(body) if len(body) > _PIECE_BYTES else body,
                headers=sent,
                timeout=_timeout(timeout_s),
                allow_redirects=False,
                proxy=self._proxy_of(base_url),
            ) as response:
                received = response.headers
                content = _without(key, await _read_all(response))
        except (aiohttp.ClientError, OSError, EOFError, ValueError) as error:
            return Reply(_lost(error, base_url, timeout_s, generation_of(received)))
        has_cache = "x-openrouter-cache-status" in received
        outcome = read_reply(response.status, received, dialect.reply(content))
        return Reply(outcome, content, has_cache)

    def _proxy_of(self, url: str) -> str | None:
        """Name the proxy of the environment for an endpoint; none for plain http, as on loopback."""
        place = urlsplit(url)
        if place.netloc not in self._proxies:
            is_direct = place.scheme != "https" or proxy_bypass(place.hostname or "")
            known = getproxies()
            self._proxies[place.netloc] = (
                None if is_direct else known.get("https", known.get("all"))
            )
        return self._proxies[place.netloc]

    async def models(
        self, base_url: str, key: SecretStr | None = None, *, dialect: Dialect | None = None
    ) -> list[dict[str, Any]]:
        """The models that an endpoint serves, with prices where it lists them.

        Raises:
            TeacherAuthError: the endpoint rejected the key.
            TeacherTimeoutError: the endpoint can't be reached.
            TeacherResponseError: its answer is no list of models.
        """
        headers = (dialect or Dialect()).authorization(key)
        reply = await self._get(f"{base_url.rstrip('/')}/models", key, headers=headers)
        models = reply.get("data")
        if not isinstance(models, list):
            raise TeacherResponseError(f"{base_url}/models: no list of models came back")
        return [model for model in models if isinstance(model, dict)]

    async def generation_cost(
        self, base_url: str, generation_id: str, key: SecretStr | None
    ) -> int | None:
        """What an earlier call cost, in nano-dollars, or `None` where that can't be found out."""
        url = f"{base_url.rstrip('/')}/generation?id={generation_id}"
        try:
            data = (await self._get(url, key)).get("data")
        except (TeacherAuthError, TeacherTimeoutError, TeacherResponseError) as error:
            logger.warning("the cost of %s is not known: %s", generation_id, error)
            return None
        cost = data.get("total_cost") if isinstance(data, dict) else None
        return nano(round(cost, 12)) if isinstance(cost, int | float) and cost >= 0 else None

    async def submit_batch(self, base_url: str, body: bytes, key: SecretStr | None) -> str:
        """Hand in a batch of requests; gives back its name. Raises as `models` does."""
        reply = await self._get(f"{base_url.rstrip('/')}/batches", key, body=body)
        if not isinstance(reply.get("id"), str):
            raise TeacherResponseError(f"{base_url}/batches: the batch was given no name")
        return reply["id"]

    async def find_batch(self, base_url: str, name: str, key: SecretStr | None) -> str | None:
        """Find the batch that was handed in with `name` as its key. Raises as `models` does."""
        after = ""
        while True:
            url = f"{base_url.rstrip('/')}/batches?limit=100{after}"
            batches = (await self._get(url, key)).get("data")
            batches = [each for each in batches or () if isinstance(each, dict)]
            for each in batches:
                if (each.get("metadata") or {}).get("key") == name:
                    return str(each.get("id"))
            if len(batches) < 100:
                return None
            after = f"&after={batches[-1].get('id')}"

    async def read_batch(
        self, base_url: str, batch_id: str, key: SecretStr | None
    ) -> dict[str, Any]:
        """A batch as it stands. Raises as `models` does."""
        return await self._get(f"{base_url.rstrip('/')}/batches/{batch_id}", key)

    async def _get(
        self,
        url: str,
        key: SecretStr | None,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        headers = {
            "accept": "application/json",
            "content-type": "application/json",
            **(Dialect().authorization(key) if headers is None else headers),
        }
        if body is not None:
            headers["content-length"] = str(len(body))
        try:
            async with self._calls.request(
                "GET" if body is None else "POST",
                url,
                data=None if body is None else _pieces(body),
                headers=headers,
                timeout=_timeout(30.0 if body is None else 300.0),
                allow_redirects=False,
                proxy=self._proxy_of(url),
            ) as response:
                reply = json.loads(await response.read())
        except (aiohttp.ClientError, OSError) as error:
            raise TeacherTimeoutError(f"{url}: cannot be reached ({_words(error)})") from error
        except ValueError as error:
            raise TeacherResponseError(f"{url}: the answer is not JSON") from error
        if response.status in (401, 403):
            raise TeacherAuthError(f"{url}: the key was rejected ({response.status})")
        if response.status >= 400 or not isinstance(reply, dict):
            raise TeacherResponseError(f"{url}: answered {response.status}")
        return reply


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    """A body of megabytes, a little at a time, so that the loop can do other things."""
    for start in range(0, len(body), _PIECE_BYTES):
        yield body[start : start + _PIECE_BYTES]


@functools.lru_cache(maxsize=64)
def _timeout(timeout_s: float) -> "aiohttp.ClientTimeout":
    """Limit the silence, not the whole call: a long reply that goes on is paid for."""
    return aiohttp.ClientTimeout(
        total=None, connect=None, sock_connect=_CONNECT_S, sock_read=timeout_s
    )


async def _read_all(response: "aiohttp.ClientResponse") -> bytes:
    is_packed = "content-encoding" in response.headers
    if not is_packed and (response.content_length or _MOST_BYTES) < _MOST_BYTES:
        return await response.read()
    pieces = bytearray()
    async for piece in response.content.iter_any():
        pieces += piece
        if len(pieces) > _MOST_BYTES:
            raise ValueError(f"the reply has more than {_MOST_BYTES >> 20} MiB")
    return bytes(pieces)


@functools.cache
def _trusted() -> ssl.SSLContext:
    """The system's certificates, read once: that takes longer than a call."""
    return ssl.create_default_context()


def run_apart(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end in a loop of its own, also where a loop is running already."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="replay") as pool:
        return pool.submit(asyncio.run, work).result()


def _without(key: SecretStr | None, sent: bytes) -> bytes:
    """What an endpoint sent, without the key: some repeat it in their error messages."""
    return sent if key is None else sent.replace(key.get_secret_value().encode(), b"<API KEY>")


def _lost(error: Exception, base_url: str, timeout_s: float, generation_id: str | None) -> Failure:
    """Judge a call that ended without a reply: harmless only if the request surely never left."""
    if isinstance(
        error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError | aiohttp.InvalidURL
    ):
        return Failure(
            "unreachable",
            f"{base_url} cannot be reached: check its address and the network ({_words(error)})",
            is_retryable=not isinstance(error, ValueError),
        )
    if isinstance(error, TimeoutError):
        code, what = "no_reply", f"no reply within {timeout_s:g} s"
    else:
        code = "connection_lost"
        what = f"the connection broke before the reply was complete ({_words(error)})"
    return Failure(
        code,
        f"{what}; the call may have been paid for",
        is_retryable=True,
        may_be_paid=True,
        generation_id=generation_id,
    )


def _words(error: Exception) -> str:
    return f"{type(error).__name__}{': ' + str(error) if str(error) else ''}"[:200]
