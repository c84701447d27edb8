"""The page: Gradio's components around the views. It asks no host but its own for anything."""

import os
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

# Read when gradio is imported, which would otherwise report to its makers.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

import gradio as gr
from starlette.middleware import Middleware

from megatron_attnres.analysis.depth.figures import NARROW, WIDE, Room
from megatron_attnres.analysis.depth.layout import TITLES, Sublayer
from megatron_attnres.analysis.live import views
from megatron_attnres.analysis.live.guard import Guard
from megatron_attnres.analysis.live.reading import LiveModel, Reading
from megatron_attnres.errors import InputError

EXAMPLE = "def add(a, b):\n    return a + b\n"
_TITLE = "Depth attention"


class _Column(NamedTuple):
    """What shows one model. Of a baseline ``map``, ``strongest`` and ``table`` stay away."""

    notice: gr.HTML
    map: gr.Plot
    strongest: gr.Plot
    table: gr.Dataframe
    magnitudes: gr.Plot


class _Choice(NamedTuple):
    """What is chosen to be shown: the values of the page's inputs, or the inputs themselves."""

    text: Any
    sublayer: Any
    token: Any
    layer: Any


def build_page(models: Sequence[LiveModel]) -> gr.Blocks:
    """The page of one model or of two side by side; ``serve`` lets it be seen."""
    room = WIDE if len(models) == 1 else NARROW
    with gr.Blocks(title=_TITLE, analytics_enabled=False, fill_width=True) as page:
        gr.HTML(f"<h1>{_TITLE}</h1>")
        choice = _choices(models)
        with gr.Row():
            columns = [_column(model, place) for place, model in enumerate(models)]

        def show(*values: Any) -> list[Any]:
            chosen = _Choice(*values)
            return [part for model in models for part in _shown(model, chosen, room)]

        def follow(text: str, token: int) -> Any:
            """The choice of tokens goes as far as the text."""
            longest = max(_length(model, text) for model in models)
            return gr.update(maximum=max(longest, 1), value=min(token, longest))

        # One at a time, and of a burst of keystrokes the last one counts.
        always = {"trigger_mode": "always_last", "show_progress": "hidden", "concurrency_limit": 1}
        hidden = {"api_visibility": "private", "concurrency_id": "models"}
        outputs = [part for column in columns for part in column]
        triggers = [page.load, *(part.change for part in choice)]
        gr.on(triggers, show, list(choice), outputs, **always, **hidden)
        gr.on(
            [page.load, choice.text.change],
            follow,
            [choice.text, choice.token],
            choice.token,
            **always,
            **hidden,
        )
        for column in columns:
            column.table.select(_token_of_row, None, choice.token, **always, **hidden)
    return page


def serve(page: gr.Blocks, host: str, port: int) -> None:
    """Start to serve; returns at once. ``page.close()`` ends it.

    Raises:
        InputError: the address cannot be listened at.
    """
    try:
        page.launch(
            server_name=host,
            server_port=port,
            share=False,
            inbrowser=False,
            quiet=True,
            prevent_thread_lock=True,
            # Gradio's own themes may load fonts from Google.
            theme=gr.themes.Base(
                font=("system-ui", "sans-serif"), font_mono=("ui-monospace", "monospace")
            ),
            # What somebody typed is kept nowhere, and nothing points to other hosts.
            run_history=False,
            footer_links=[],
            ssr_mode=False,
            pwa=False,
            mcp_server=False,
            enable_monitoring=False,
            app_kwargs={"middleware": [Middleware(Guard, host=host)]},
        )
    except OSError as error:
        reason = " ".join(str(error).split())
        raise InputError(f"--host {host} --port {port}: cannot be listened at ({reason})") from None


def _choices(models: Sequence[LiveModel]) -> _Choice:
    text = gr.Textbox(EXAMPLE, label="text", lines=4, max_lines=12, elem_id="text", autofocus=True)
    with gr.Row():
        sublayer = gr.Radio(
            [(title, name) for name, title in TITLES.items()],
            value="attention",
            label="readers",
            elem_id="sublayer",
        )
        token = gr.Slider(
            0, 1, 0, step=1, label="token of the map (0: mean over all tokens)", elem_id="token"
        )
        layers = views.layers_of([model.layout for model in models])
        layer = gr.Dropdown(
            layers,
            value=layers[0],
            label="layer of the table",
            elem_id="layer",
        )
    return _Choice(text, sublayer, token, layer)


def _column(model: LiveModel, place: int) -> _Column:
    has_weights = bool(model.layout.readers)
    with gr.Column(min_width=420):
        stored = model.stored
        gr.HTML(f"<h2>{escape(stored.given)}, iteration {stored.iteration:,}</h2>")
        return _Column(
            gr.HTML(elem_id=f"notice-{place}"),
            gr.Plot(show_label=False, visible=has_weights, elem_id=f"map-{place}"),
            gr.Plot(show_label=False, visible=has_weights, elem_id=f"strongest-{place}"),
            gr.Dataframe(
                headers=views.HEADERS,
                datatype="str",
                interactive=False,
                max_height=420,
                label="most attended source of every token (click a row for the token's map)",
                visible=has_weights,
                elem_id=f"table-{place}",
            ),
            gr.Plot(show_label=False, elem_id=f"magnitudes-{place}"),
        )


def _shown(model: LiveModel, chosen: _Choice, room: Room) -> _Column:
    """The values of a column's components."""
    sublayer: Sublayer = chosen.sublayer
    reading: Reading | None = None
    try:
        reading = model.read(chosen.text)
        notice = views.notice_of(reading, model.context)
    except InputError as error:
        notice = str(error)
    return _Column(
        escape(notice),
        views.map_of(reading, sublayer, int(chosen.token), room),
        views.strongest_of(reading, sublayer, room),
        views.rows_of(reading, sublayer, chosen.layer),
        views.magnitudes_of(reading),
    )


def _length(model: LiveModel, text: str) -> int:
    """In tokens, as far as the model reads it."""
    try:
        reading = model.read(text)
    except InputError:
        return 0
    return 0 if reading is None else len(reading.texts)


def _token_of_row(event: gr.SelectData) -> int:
    return event.index[0] + 1
