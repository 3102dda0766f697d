"""Serve the page of `look` next to Dagster's pages, behind the same gate."""

from http import HTTPStatus
from pathlib import Path

from starlette.applications import Starlette
from starlette.responses import RedirectResponse
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

PLACE = "/look/"


class WithPage:
    """Dagster's web application with an added page at its root.

    Args:
        app: the application.
        folder: folder of the page. It may appear, change, and disappear while it is served.
    """

    def __init__(self, app: ASGIApp, folder: Path) -> None:
        self._app = app
        self._index = folder / "index.html"
        files = StaticFiles(directory=folder, check_dir=False)
        self._files = Starlette(routes=[Mount(PLACE.rstrip("/"), files)])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer what is about the page, and pass on the rest."""
        path = scope.get("path", "")
        if scope["type"] == "http" and path == "/" and self._index.is_file():
            response = RedirectResponse(f"{PLACE}index.html", HTTPStatus.SEE_OTHER)
            await response(scope, receive, send)
        elif scope["type"] == "http" and path.startswith(PLACE) and self._index.is_file():
            await self._files(scope, receive, send)
        else:
            await self._app(scope, receive, send)
