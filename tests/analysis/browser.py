"""A browser for tests of pages: Debian's chromium, driven by playwright."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or find_spec("playwright") is None,
    reason="needs chromium (apt install chromium) and playwright (pip install playwright)",
)


@contextmanager
def browser_page(**options: Any) -> Iterator[tuple[Any, list[str], list[str]]]:
    """A page, the addresses of all its requests so far, and the errors of its scripts so far."""
    from playwright.sync_api import sync_playwright

    requests: list[str] = []
    errors: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(**options)
        page.on("request", lambda request: requests.append(request.url))
        page.on("websocket", lambda socket: requests.append(socket.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: errors.append(f"dialog: {dialog.message}"))
        page.on(
            "console",
            lambda message: errors.append(message.text) if message.type == "error" else None,
        )
        try:
            yield page, requests, errors
        finally:
            browser.close()


def cell_position(page: Any, plot: str, row: int, column: int) -> tuple[float, float]:
    """Where the middle of a cell of a Plotly heat map is on the screen, scrolled into view."""
    page.locator(plot).scroll_into_view_if_needed()
    x, y = page.evaluate(
        """([plot, row, column]) => {
            const map = document.querySelector(plot), box = map.getBoundingClientRect();
            const { xaxis, yaxis } = map._fullLayout;
            const x = xaxis._offset + xaxis.l2p(column), y = yaxis._offset + yaxis.l2p(row);
            return [box.x + x, box.y + y];
        }""",
        [plot, row, column],
    )
    return x, y


def hover_text(page: Any, plot: str, row: int, column: int) -> str:
    """What somebody is told who moves the mouse to a cell.

    Tried again where a figure is drawn anew at that moment, which takes its label away.
    """
    from playwright.sync_api import TimeoutError as TooLate

    label = page.locator(f"{plot} .hovertext")
    for patience in (2_000, 4_000, 8_000, 16_000):
        page.mouse.move(0, 0)
        label.wait_for(state="detached")
        page.mouse.move(*cell_position(page, plot, row, column))
        try:
            label.wait_for(timeout=patience)
            return label.text_content(timeout=patience)
        except TooLate:
            continue
    raise AssertionError(f"no label at row {row}, column {column} of {plot}")
