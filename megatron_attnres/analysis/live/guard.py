"""What the page's server refuses: uploads, and pages of other sites that ask through a browser.

A site's name may be pointed at 127.0.0.1 while somebody looks at it; its scripts then speak to
whatever listens there as if it were theirs. They cannot choose what the browser puts into Host.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import PlainTextResponse

_LOOPBACK = ("127.0.0.1", "localhost")
_UPLOADS = "/upload"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Server = Callable[[Message, Receive, Send], Awaitable[None]]


class Guard:
    """Refuses requests before the page's server sees them.

    Args:
        server: an ASGI application.
        host: that is listened at. Of the loopback only requests to it by name or number are
            answered; whoever listens elsewhere lets others in, by names that are not known here.
    """

    def __init__(self, server: Server, host: str) -> None:
        self._server = server
        self._only_loopback = host in _LOOPBACK

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """See ASGI."""
        reason = self._reason(scope) if scope["type"] in ("http", "websocket") else None
        if reason is None:
            await self._server(scope, receive, send)
        else:
            await PlainTextResponse(reason, 403)(scope, receive, send)

    def _reason(self, scope: Message) -> str | None:
        # Nothing on the page takes files, and what is uploaded would stay on the disk.
        if scope["path"].rstrip("/").endswith(_UPLOADS):
            return "uploads are not taken"
        named = dict(scope["headers"]).get(b"host", b"").decode("latin-1").rpartition(":")
        name = named[0] or named[2]
        if self._only_loopback and name not in _LOOPBACK:
            return "this page is at 127.0.0.1"
        return None
