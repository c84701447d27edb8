"""The page in a browser: type, choose, click, and hold what is shown against the model."""

import re
import socket
from importlib.util import find_spec
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest

from megatron_attnres.analysis.depth.records import strongest, table_of
from megatron_attnres.errors import InputError
from tests.analysis.browser import browser_page, hover_text, needs_browser
from tests.analysis.live.trained import CONTEXT, live_models

pytestmark = [
    needs_browser,
    pytest.mark.skipif(
        find_spec("gradio") is None, reason="needs gradio (pip install 'megatron_attnres[app]')"
    ),
]
MAP = "#map-0 .js-plotly-plot"
HOSTILE = "<b>x</b> <img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def outside():
    """Addresses beyond this machine that anything in this process tries to reach."""
    reached: list[str] = []
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def watched_connect(self, address):
        if isinstance(address, tuple) and not str(address[0]).startswith(("127.", "::1")):
            reached.append(str(address))
        return connect(self, address)

    def watched_look_up(host, *arguments, **options):
        if host not in (None, "127.0.0.1", "localhost", b"127.0.0.1"):
            reached.append(str(host))
        return look_up(host, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", watched_connect)
        patch.setattr(socket, "getaddrinfo", watched_look_up)
        yield reached


@pytest.fixture(scope="module")
def served(tmp_path_factory, outside):
    """The models and the address of their page."""
    from megatron_attnres.analysis.live.page import build_page, serve

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with live_models(tmp_path_factory.mktemp("checkpoints")) as models:
        page = build_page(models)
        serve(page, "127.0.0.1", port)
        try:
            yield models, f"http://127.0.0.1:{port}"
        finally:
            page.close(verbose=False)


def type_in(page, text):
    page.locator("#text textarea").fill(text)


def wait_for_notice(page, place, words):
    page.wait_for_function(
        "([place, words]) => document.getElementById(`notice-${place}`).innerText.includes(words)",
        arg=[place, words],
    )


def wait_for_map(page, table):
    """Until the map shows these weights."""
    wanted = [[None if np.isnan(cell) else float(cell) for cell in row] for row in table]
    page.wait_for_function(
        """([plot, wanted]) => {
            const shown = document.querySelector(plot)?.data?.[0].z;
            return shown && wanted.every((row, i) => row.every((cell, j) =>
                cell === null ? shown[i][j] === null : Math.abs(shown[i][j] - cell) < 1e-9));
        }""",
        arg=[MAP, wanted],
    )


def wait_for_first_row(page, reading, sublayer, row):
    sources, largest = strongest(reading.weights, sublayer)
    name = reading.weights.layout.sources[sources[row, 0]].name
    page.wait_for_function(
        """words => {
            const row = document.querySelector('#table-0 div[role=row]');
            return row && words.every(word => row.innerText.includes(word));
        }""",
        arg=[reading.texts[0], name, f"{largest[row, 0]:.4f}"],
    )


def test_what_is_typed_is_what_is_shown(served, outside, tmp_path):
    (block, _), address = served
    with browser_page(viewport={"width": 1500, "height": 1000}) as (page, requests, errors):
        page.goto(address)
        page.wait_for_selector(f"{MAP} .main-svg")
        type_in(page, "one two")
        reading = block.read("one two")
        wait_for_notice(page, 0, f"7 of at most {CONTEXT} tokens.")
        wait_for_map(page, table_of(reading.weights.mean(), "attention"))
        wait_for_first_row(page, reading, "attention", 3)
        wait_for_notice(page, 1, "A baseline has no depth weights.")
        assert not page.locator("#map-1, #table-1").filter(visible=True).count()
        assert page.locator("#magnitudes-1 .main-svg").count()

        hover = hover_text(page, MAP, 2, 1)
        assert hover.startswith("layer 3, attention; source: block 1")
        mean = table_of(reading.weights.mean(), "attention")[2, 1]
        assert float(re.search(r"weight (\S+)", hover)[1]) == pytest.approx(mean, abs=1e-4)

        page.get_by_label("pre-MLP").check()
        wait_for_map(page, table_of(reading.weights.mean(), "mlp"))
        page.locator("#layer input").click()
        page.get_by_role("option", name="1", exact=True).click()
        wait_for_first_row(page, reading, "mlp", 0)
        page.locator("#table-0 div[role=row]").nth(1).click()
        wait_for_map(page, table_of(reading.weights.at(1), "mlp"))
        assert page.locator("#token input[type=number]").input_value() == "2"
        page.screenshot(path=tmp_path / "two_models.png", full_page=True)

        type_in(page, HOSTILE)
        wait_for_notice(page, 0, f"{len(HOSTILE)} of at most")
        wait_for_map(page, table_of(block.read(HOSTILE).weights.at(1), "mlp"))
        assert not page.locator("img[src='x']").count()
        type_in(page, "x" * 1000)
        wait_for_notice(page, 0, f"longer than the model's context: shown are its last {CONTEXT}")
        type_in(page, "")
        wait_for_notice(page, 0, "Nothing to read yet")

        hosts = {one for one in requests if not one.startswith((address, "data:", "blob:"))}
        assert hosts == set()
        assert errors == []
    assert outside == []


def test_a_port_that_was_taken_meanwhile_is_named(served):
    from megatron_attnres.analysis.live.page import build_page, serve

    models, address = served
    port = int(address.rpartition(":")[2])
    with pytest.raises(InputError, match=f"--port {port}: cannot be listened at"):
        serve(build_page(models[:1]), "127.0.0.1", port)


def test_other_hosts_and_uploads_are_refused(served):
    _, address = served
    for path, headers, data, status in (
        ("/config", {}, None, 200),
        ("/config", {"Host": "evil.example"}, None, 403),
        ("/gradio_api/upload", {}, b"files", 403),
    ):
        try:
            found = urlopen(Request(address + path, data, headers)).status
        except HTTPError as error:
            found = error.code
        assert found == status, path
