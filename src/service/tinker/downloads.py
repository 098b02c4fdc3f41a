"""Weights for download: they are saved as for samplers, and fetched by URLs that are valid for an hour.

Clients fetch these URLs without a key: each has a signature instead. There is no other way to the files.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from hashlib import sha256
from urllib.parse import quote

from fastapi import FastAPI, Request
from starlette.responses import FileResponse

from service.errors import JsonReply
from service.keys import ANY_TEXT, same_text
from service.requests import RequestRefused
from service.routes import SIGNED
from service.tinker.bodies import Seq
from service.tinker.callers import Asking
from service.tinker.catalog import Catalog, SavedKind, path_of
from trireme.core.paths import path_in

KIND: SavedKind = "external_weights"
HOLDS_S = 3600


class DownloadRoutes:
    """The routes of weights for download."""

    def __init__(self, catalog: Catalog, now: Callable[[], float]) -> None:
        """`now`: seconds since 1970."""
        self._catalog = catalog
        self._now = now
        self._secret = secrets.token_bytes(32)

    def add(self, app: FastAPI) -> None:
        """Adds these routes to an app."""
        app.get(f"/api/v1/training_runs/{{model_id}}/checkpoints/{KIND}/{{name}}/external_weights_urls")(self.urls)
        app.get(SIGNED + "{until}/{signature}/{model_id}/{name}/{file:path}")(self.file)

    async def urls(self, caller: Asking, request: Request, model_id: str, name: str) -> JsonReply:
        """Returns the signed URLs of the files of saved weights, and when they expire."""
        _, saved = self._catalog.find(path_of(model_id, KIND, name), KIND, caller)
        until = int(self._now()) + HOLDS_S
        base = str(request.base_url).rstrip("/")
        urls = {}
        for file in saved.files:
            signature = self._sign(until, model_id, name, file)
            urls[file] = f"{base}{SIGNED}{until}/{signature}/{quote(f'{model_id}/{name}/{file}')}"
        return JsonReply({"urls": urls, "expires": datetime.fromtimestamp(until, UTC).isoformat()})

    async def file(self, until: Seq, signature: str, model_id: str, name: str, file: str) -> FileResponse:
        """Returns a file of a saved adapter or model. Needs no key, because the URL is signed. `until`: when the URL
        expires, in seconds since 1970. Raises RequestRefused if the signature is wrong or the URL has expired."""
        if not same_text(signature, self._sign(until, model_id, name, file)) or until < self._now():
            raise RequestRefused(
                "an address that this server did not sign, or not within the last hour; get_external_weights_urls "
                "gives new ones",
                status=403,
            )
        directory, _ = self._catalog.find(path_of(model_id, KIND, name), KIND)
        return FileResponse(path_in(directory, file))

    def _sign(self, until: int, *parts: str) -> str:
        """Returns the signature of a file's URL. Only this process can sign, as no other process has the secret."""
        return hmac.new(self._secret, "\n".join((str(until), *parts)).encode(errors=ANY_TEXT), sha256).hexdigest()
