"""Tell people that something happened: one JSON message to the webhook of their choice.

The message has a `text`, which chat services show, and a few plain facts. It contains no key, no
session text, and no address of this machine. A failed message never fails a run. It is logged
without the webhook's address, because anyone who knows the address can post there.
"""

import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any

from replay_pipeline.redaction.redactor import Redactor
from replay_pipeline.settings import NotifySettings

logger = logging.getLogger(__name__)

_MAX_CHARS = 500


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow no redirect: a webhook that moves is a wrong setting, and nothing is posted elsewhere."""


def notify(settings: NotifySettings, event: str, text: str, facts: Mapping[str, Any]) -> bool:
    """Post a message to the webhook, if there is one, and return whether it was accepted."""
    if settings.webhook_url is None:
        return False
    url = settings.webhook_url.get_secret_value()
    body = json.dumps({"event": event, "text": text, **facts}, default=str).encode()
    outcome: list[str] = []
    # A server may answer byte by byte for ever: the thread is left behind when the time is up.
    thread = threading.Thread(
        target=lambda: outcome.append(_post(url, body, settings.timeout_s)), daemon=True
    )
    thread.start()
    thread.join(settings.timeout_s)
    problem = outcome[0] if outcome else f"no answer within {settings.timeout_s:g} s"
    if problem:
        logger.warning("could not tell the webhook about %s: %s", event, problem)
    return not problem


def _post(url: str, body: bytes, timeout_s: float) -> str:
    """Post it; give back what went wrong, if anything did."""
    try:
        request = urllib.request.Request(  # noqa: S310 (settings allow http and https alone)
            url, data=body, headers={"content-type": "application/json"}
        )
        with urllib.request.build_opener(_NoRedirect()).open(request, timeout=timeout_s):
            return ""
    except urllib.error.HTTPError as error:
        with error:
            return f"it answered with status {error.code}"
    except (OSError, ValueError, HTTPException) as error:
        return type(error).__name__


def reasons_shown(reasons: Sequence[str], *, secrets: Sequence[str]) -> list[str]:
    """Return error messages without secrets and cut to length, so that they may leave this machine."""
    redactor = Redactor()
    texts = []
    for reason in reasons:
        for secret in secrets:
            reason = reason.replace(secret, "<KEY>")
        texts.append(redactor.text(" ".join(reason.split())))
    return [text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]} …" for text in texts]
