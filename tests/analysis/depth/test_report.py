"""The report's parts without a browser: what is embedded, how large it is, that nothing acts."""

import json
import re
from base64 import b64decode

import numpy as np

from megatron_attnres.analysis.depth.embedding import FULL_WEIGHT, encode_weights, script_json
from megatron_attnres.analysis.depth.figures import map_figure, strongest_figure
from megatron_attnres.analysis.depth.report import report_page
from tests.analysis.depth.synthetic import NASTY, measurement_of, token_weights


def page_of(weights, texts, title="a run"):
    measurement = measurement_of(weights)
    return report_page(title, "about", measurement.weights, weights, texts, measurement.magnitudes)


def test_embedded_weights_come_back():
    weights = token_weights(5, "block", 3, 7)
    back = np.frombuffer(b64decode(encode_weights(weights)), dtype="<u2") / FULL_WEIGHT
    flat = np.concatenate([one.ravel() for one in weights.weights])
    np.testing.assert_allclose(back, flat, atol=0.5 / FULL_WEIGHT + 1e-7)


def test_text_in_a_script_element_stays_text():
    text = script_json(NASTY)
    assert not set("<>&\u2028") & set(text)
    assert text.isascii()
    assert text.isprintable()
    assert json.loads(text) == NASTY


def test_a_hostile_text_ends_no_element():
    weights = token_weights(2, "block", 2, len(NASTY))
    harmless = page_of(weights, ["a"] * len(NASTY))
    page = page_of(weights, NASTY, title="</title><script>alert(1)</script>&")
    for tag in ("script", "title", "style", "img", "b"):
        count = [len(re.findall(f"</?{tag}[ >]", one)) for one in (page, harmless)]
        assert count[0] == count[1], tag
    assert "<title>&lt;/title&gt;&lt;script&gt;alert(1)&lt;/script&gt;&amp;</title>" in page
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert json.loads(data)["tokens"] == NASTY


def test_a_deep_model_fits_into_ten_megabytes():
    weights = token_weights(48, "full", 1, 128)
    assert len(weights.layout.sources) == 97
    assert len(page_of(weights, ["token"] * 128).encode()) < 10e6


def test_figures_are_data_that_any_version_draws():
    weights = token_weights(5, "block", 3, 4)
    cells, dots = json.loads(map_figure(weights.mean(), "mlp", "<b>").to_json())["data"]
    table = np.array(cells["z"], dtype=float)
    assert table.shape == (6, 5)
    np.testing.assert_allclose(np.nansum(table, axis=1), 1, rtol=1e-6)
    assert cells["z"][0][2:] == [None] * 3
    assert cells["customdata"][0][1] == "layer 1, MLP; source: block 1 (partial sum)"
    assert cells["customdata"][5][4] == "output head; source: block 4"
    assert [*zip(dots["y"], dots["x"], strict=True)] == [(0, 1), (2, 2), (3, 3)]


def test_texts_in_figures_are_escaped():
    weights = token_weights(3, "block", 2, len(NASTY))
    figure = strongest_figure(weights, NASTY, "attention", "<b>title</b>")
    assert figure.layout.title.text == "&lt;b&gt;title&lt;/b&gt;"
    assert "&lt;b&gt;bold&lt;/b&gt;" in figure.layout.xaxis.ticktext
    assert all("&lt;b&gt;bold&lt;/b&gt; (token 10)" in row[9] for row in figure.data[0].customdata)
