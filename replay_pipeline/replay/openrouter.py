"""The one module that speaks HTTP: sends a request once, and says what became of it.

It never retries and never gives up early: an aborted call is paid for. Foreign errors end here; a
`Failure` tells apart a request that never left from one whose outcome is unknown.
"""

import asyncio
import functools
import logging
import ssl
import urllib.request
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport
from pydantic import SecretStr

from replay_pipeline.errors import TeacherAuthError, TeacherResponseError, TeacherTimeoutError
from replay_pipeline.replay.prices import nano
from replay_pipeline.replay.replies import Answer, Failure, read_reply

logger = logging.getLogger(__name__)

T = TypeVar("T")

# One line per call at INFO would drown everything else.
logging.getLogger("httpx").setLevel(logging.WARNING)

_KEEPALIVE_S = 20.0
_CONNECT_S = 15.0
_PIECE_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of one request, and the bytes that came back."""

    outcome: Answer | Failure
    body: bytes = b""


class Client:
    """Connections to endpoints, shared by all teachers of a run."""

    def __init__(self, *, max_connections: int = 512) -> None:
        limits = httpx.Limits(
            max_connections=max_connections,
            max_keepalive_connections=max_connections,
            keepalive_expiry=_KEEPALIVE_S,
        )
        direct = AiohttpTransport(verify=_trusted(), limits=limits)
        if urllib.request.getproxies():
            # The faster transport knows no proxies from the environment. Plain http is for loopback,
            # and what is sent there unencrypted is no matter of a proxy.
            self._http = httpx.AsyncClient(limits=limits, mounts={"http://": direct})
        else:
            self._http = httpx.AsyncClient(transport=direct, trust_env=False)

    async def __aenter__(self) -> "Client":
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def complete(
        self,
        base_url: str,
        body: bytes,
        *,
        headers: Mapping[str, str],
        key: SecretStr | None,
        timeout_s: float,
    ) -> Reply:
        """Send one chat completion, exactly once."""
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S, pool=None)
        try:
            response = await self._http.post(
                _completions_url(base_url),
                content=body,
                headers=_with_key(headers, key),
                timeout=timeout,
            )
        except (httpx.HTTPError, httpx.InvalidURL, OSError, EOFError, ValueError) as error:
            return Reply(_lost(error, base_url, timeout_s))
        # Plain dict: the headers of a response are looked up many times per call.
        received = {
            name.decode("latin-1").lower(): _without(key, value).decode("latin-1")
            for name, value in response.headers.raw
        }
        content = _without(key, response.content)
        return Reply(read_reply(response.status_code, received, content), content)

    async def models(self, base_url: str, key: SecretStr | None = None) -> list[dict[str, Any]]:
        """The models that an endpoint serves, with prices where it lists them.

        Raises:
            TeacherAuthError: the endpoint rejected the key.
            TeacherTimeoutError: the endpoint can't be reached.
            TeacherResponseError: its answer is no list of models.
        """
        reply = await self._get(f"{base_url.rstrip('/')}/models", key)
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
        return nano(round(cost, 12)) if isinstance(cost, int | float) else None

    async def submit_batch(self, base_url: str, body: bytes, key: SecretStr | None) -> str:
        """Hand in a batch of requests; gives back its name. Raises as `models` does."""
        reply = await self._get(f"{base_url.rstrip('/')}/batches", key, body=body)
        if not isinstance(reply.get("id"), str):
            raise TeacherResponseError(f"{base_url}/batches: the batch was given no name")
        return reply["id"]

    async def read_batch(
        self, base_url: str, batch_id: str, key: SecretStr | None
    ) -> dict[str, Any]:
        """A batch as it stands. Raises as `models` does."""
        return await self._get(f"{base_url.rstrip('/')}/batches/{batch_id}", key)

    async def _get(
        self, url: str, key: SecretStr | None, *, body: bytes | None = None
    ) -> dict[str, Any]:
        headers = _with_key({"accept": "application/json", "content-type": "application/json"}, key)
        if body is not None:
            headers["content-length"] = str(len(body))
        try:
            response = await self._http.request(
                "GET" if body is None else "POST",
                url,
                content=None if body is None else _pieces(body),
                headers=headers,
                timeout=30.0 if body is None else 300.0,
            )
            reply = response.json()
        except (httpx.HTTPError, OSError) as error:
            raise TeacherTimeoutError(f"{url}: cannot be reached ({_words(error)})") from error
        except ValueError as error:
            raise TeacherResponseError(f"{url}: the answer is not JSON") from error
        if response.status_code in (401, 403):
            raise TeacherAuthError(f"{url}: the key was rejected ({response.status_code})")
        if response.status_code >= 400 or not isinstance(reply, dict):
            raise TeacherResponseError(f"{url}: answered {response.status_code}")
        return reply


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    """A body of megabytes, a little at a time, so that the loop can do other things."""
    for start in range(0, len(body), _PIECE_BYTES):
        yield body[start : start + _PIECE_BYTES]


@functools.lru_cache(maxsize=64)
def _completions_url(base_url: str) -> httpx.URL:
    return httpx.URL(f"{base_url.rstrip('/')}/chat/completions")


@functools.cache
def _trusted() -> ssl.SSLContext:
    """The system's certificates, read once: that takes longer than a call."""
    return ssl.create_default_context()


def run_apart(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end in a loop of its own, also where a loop is running already."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="replay") as pool:
        return pool.submit(asyncio.run, work).result()


def _with_key(headers: Mapping[str, str], key: SecretStr | None) -> dict[str, str]:
    if key is None:
        return dict(headers)
    return {**headers, "authorization": f"Bearer {key.get_secret_value()}"}


def _without(key: SecretStr | None, sent: bytes) -> bytes:
    """What an endpoint sent, without the key: some repeat it in their error messages."""
    return sent if key is None else sent.replace(key.get_secret_value().encode(), b"<API KEY>")


def _lost(error: Exception, base_url: str, timeout_s: float) -> Failure:
    """A call that ended without a reply: harmless only if the request surely never left."""
    # The transport calls every lost connection a connect timeout; its own error knows better.
    is_unsent = isinstance(
        error.__cause__, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError
    )
    if is_unsent or isinstance(
        error, httpx.ConnectError | httpx.UnsupportedProtocol | httpx.InvalidURL
    ):
        return Failure(
            code="unreachable",
            message=f"{base_url} cannot be reached: check its address and the network "
            f"({_words(error)})",
            is_retryable=not isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL),
        )
    if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
        return Failure(
            code="no_reply",
            message=f"no reply within {timeout_s:g} s; the call may have been paid for",
            is_retryable=True,
            may_be_paid=True,
        )
    return Failure(
        code="connection_lost",
        message=f"the connection broke before the reply was complete ({_words(error)}); the call "
        "may have been paid for",
        is_retryable=True,
        may_be_paid=True,
    )


def _words(error: Exception) -> str:
    return f"{type(error).__name__}{': ' + str(error) if str(error) else ''}"[:200]
