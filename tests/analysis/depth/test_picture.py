"""Pictures: their size, and that what is written in them can be read."""

import warnings
from itertools import pairwise

import pytest
from matplotlib.figure import Figure

from megatron_attnres.analysis.depth.picture import (
    draw_magnitudes,
    draw_token_weights,
    draw_weights,
)
from tests.analysis.depth.synthetic import NASTY, measurement_of, token_weights

DEEP = [(48, "block", 12), (48, "block", 2), (48, "full", 1)]
SMALL = [(2, "block", 4), (9, "block", 5)]


@pytest.fixture
def drawn(monkeypatch):
    """Every figure that was saved."""
    figures, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield figures


def check_labels(figure):
    """They are of a readable size, on the picture, and do not overlap their neighbours."""
    renderer = figure.canvas.get_renderer()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            labels = [label for label in axis.get_ticklabels() if label.get_text()]
            boxes = [label.get_window_extent(renderer) for label in labels]
            assert all(label.get_fontsize() >= 7 for label in labels)
            assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
            assert all(figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1 for box in boxes)
            along = ("x0", "x1") if axis is axes.xaxis else ("y0", "y1")
            spans = sorted(tuple(getattr(box, edge) for edge in along) for box in boxes)
            assert all(one[1] <= other[0] + 0.5 for one, other in pairwise(spans)), axes.get_title()


def size_of(path):
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(header[16:20]), int.from_bytes(header[20:24])


@pytest.mark.parametrize(("layers", "mode", "block_size"), [*DEEP, *SMALL])
def test_maps_can_be_read(layers, mode, block_size, drawn, tmp_path):
    weights = token_weights(layers, mode, block_size, 3)
    draw_weights(weights.mean(), "a run, 3 tokens", tmp_path / "a.png")
    assert size_of(tmp_path / "a.png")[0] == 1600
    [figure] = drawn
    check_labels(figure)
    panels = figure.axes[:2]
    assert [axes.get_title(loc="left") for axes in panels] == ["pre-attention", "pre-MLP"]
    assert len(figure.axes) == 3  # and one colour bar
    for axes in panels:
        assert [label.get_text() for label in axes.get_yticklabels()][-1] == "head"
        colours = axes.collections[0]
        assert colours.norm.vmin == 0
        assert colours.norm.vmax == 1
    # The first attention reads the embedding alone.
    cells = panels[0].collections[0].get_array()
    assert cells[0].tolist() == [1.0] + [None] * (len(weights.layout.sources) - 1)


@pytest.mark.parametrize(
    ("layers", "mode", "block_size", "texts"),
    [(*DEEP[2], [str(10**11 + i) for i in range(128)]), *((*case, NASTY) for case in SMALL)],
)
def test_token_pictures_can_be_read(layers, mode, block_size, texts, drawn, tmp_path):
    weights = token_weights(layers, mode, block_size, len(texts))
    draw_token_weights(weights, texts, "$a run", tmp_path / "a.png")
    assert size_of(tmp_path / "a.png")[0] == 1600
    check_labels(drawn[0])


def test_magnitudes_of_any_model(drawn, tmp_path):
    for case in (*SMALL, (3, "full", 1)):
        magnitudes = measurement_of(token_weights(*case, 2)).magnitudes
        draw_magnitudes(magnitudes, "a run", tmp_path / "a.png")
    assert size_of(tmp_path / "a.png")[0] == 1600
    assert [len(figure.axes[0].lines) for figure in drawn] == [1 + 1, 1 + 4, 1]
