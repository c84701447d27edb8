"""What the page's server answers, and what not."""

import asyncio
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(
    find_spec("starlette") is None, reason="needs gradio (pip install 'megatron_attnres[app]')"
)


def status_of(listened_at, path, asked_for):
    """Of a request with this Host; 200 where the server behind the guard got it."""
    from megatron_attnres.analysis.live.guard import Guard

    statuses = []

    async def server(scope, receive, send):
        statuses.append(200)

    async def send(message):
        statuses.extend([message["status"]] if message["type"] == "http.response.start" else [])

    headers = [] if asked_for is None else [(b"host", asked_for.encode())]
    scope = {"type": "http", "path": path, "headers": headers}
    asyncio.run(Guard(server, listened_at)(scope, None, send))
    (status,) = statuses
    return status


@pytest.mark.parametrize(
    ("listened_at", "path", "asked_for", "status"),
    [
        ("127.0.0.1", "/", "127.0.0.1:7860", 200),
        ("127.0.0.1", "/", "localhost", 200),
        ("localhost", "/config", "localhost:7860", 200),
        ("127.0.0.1", "/", "evil.example", 403),
        ("127.0.0.1", "/config", "evil.example:7860", 403),
        ("127.0.0.1", "/", "127.0.0.1.evil.example", 403),
        ("127.0.0.1", "/", "[::1]:7860", 403),
        ("127.0.0.1", "/", None, 403),
        ("0.0.0.0", "/", "machine.example:7860", 200),
        ("0.0.0.0", "/gradio_api/upload", "machine.example:7860", 403),
        ("127.0.0.1", "/gradio_api/upload", "127.0.0.1:7860", 403),
        ("127.0.0.1", "/upload/", "127.0.0.1:7860", 403),
    ],
)
def test_who_is_answered(listened_at, path, asked_for, status):
    assert status_of(listened_at, path, asked_for) == status
