"""The door in front of every route: no key, no answer, except on the few routes that are open by name.

An ASGI layer around the whole application, so that a route that is added later is behind it too. Owns the decision and nothing of
requests; the key id it found is left in the scope for those who count and log.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from common.api_keys import KeyRing
from common.errors import BatonError, Unauthenticated

SCOPE_KEY_ID = "baton.key_id"
OPEN_ROUTES = frozenset({"/healthz", "/health", "/readyz"})
"""What load balancers ask, with nothing of any tenant in the answers. Compared whole, never as prefixes."""

SendError = Callable[[Scope, Send, BatonError], Awaitable[None]]


class AccessGate:
    """Lets requests with a known key through. `keys` None: access control is off, and everyone is the same nobody."""

    def __init__(self, app: ASGIApp, keys: KeyRing | None, *, metrics_are_open: bool, send_error: SendError) -> None:
        self._app = app
        self._keys = keys
        self._open_routes = OPEN_ROUTES | {"/metrics"} if metrics_are_open else OPEN_ROUTES
        self._send_error = send_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self._keys is None:
            await self._app(scope, receive, send)
            return
        key_id = self._keys.find(presented) if (presented := _bearer(scope)) is not None else None
        if key_id is not None:
            scope[SCOPE_KEY_ID] = key_id
        elif scope["type"] != "http" or scope["path"] not in self._open_routes:
            message = "no API key was given" if presented is None else "the API key is not known"
            error = Unauthenticated(f"{message}; send it as 'Authorization: Bearer KEY'", code="invalid_api_key")
            await self._send_error(scope, send, error)
            return
        await self._app(scope, receive, send)


def _bearer(scope: Scope) -> str | None:
    """The key of the Authorization header, if there is exactly one such header of that form."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, key = values[0].decode("latin-1").partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else None


def cache_salt_of(key_id: str, cluster_secret: bytes) -> bytes:
    """Separates the prefix caches of key holders: 16 bytes that nobody without the cluster's secret can guess or choose."""
    return hmac.new(cluster_secret, b"baton prefix cache\x00" + key_id.encode(), hashlib.sha256).digest()[:16]
