"""What the page shows of a reading, without a page or a model."""

import numpy as np
import pytest

from megatron_attnres.analysis.depth.figures import NARROW, WIDE
from megatron_attnres.analysis.depth.layout import HEAD, layout_of
from megatron_attnres.analysis.depth.records import Magnitudes, table_of
from megatron_attnres.analysis.live import views
from megatron_attnres.analysis.live.reading import Reading
from tests.analysis.depth.synthetic import NASTY, measurement_of, token_weights
from tests.layouts import small_model

WEIGHTS = token_weights(3, "block", 2, len(NASTY))
READING = Reading(NASTY, False, WEIGHTS, measurement_of(WEIGHTS).magnitudes)
LAYOUT = layout_of(small_model(mode="baseline"))
BASELINE = Reading(["a"], False, None, Magnitudes(LAYOUT, np.ones(4), None, None, 0))


def test_notices():
    assert views.notice_of(None, 99) == "Nothing to read yet: type a text."
    assert views.notice_of(READING, 99) == "20 of at most 99 tokens. Loss 2.500 nats per token."
    assert "shown are its last 20 tokens" in views.notice_of(
        Reading(NASTY, True, None, READING.magnitudes), 20
    )
    notice = views.notice_of(BASELINE, 99)
    assert notice == "1 of at most 99 tokens. A baseline has no depth weights."


@pytest.mark.parametrize("token", [0, 3, 99])
def test_the_map_is_of_the_token_or_the_mean(token):
    figure = views.map_of(READING, "mlp", token, WIDE)
    wanted = WEIGHTS.at(2) if token == 3 else WEIGHTS.mean()
    found = np.array(figure.data[0].z, dtype=float)
    np.testing.assert_allclose(found, table_of(wanted, "mlp"))
    assert ("token 3" in figure.layout.title.text) == (token == 3)


def test_rows_are_of_the_layer_or_the_last_one():
    places = {"1": 0, "3": 4, "9": 4, HEAD: 6}
    for layer, place in places.items():
        rows = views.rows_of(READING, "attention", layer)
        own = WEIGHTS.weights[place]
        assert [row[1] for row in rows] == NASTY
        for token, (number, _, source, weight) in enumerate(rows):
            assert number == str(token + 1)
            best = own[:, token].argmax()
            assert source == WEIGHTS.layout.sources[best].name
            assert weight == f"{own[best, token]:.4f}"


def test_nothing_to_show():
    for reading in (None, BASELINE):
        assert views.map_of(reading, "mlp", 0, WIDE) is None
        assert views.strongest_of(reading, "mlp", WIDE) is None
        assert views.rows_of(reading, "mlp", "1") == []
    assert views.magnitudes_of(None) is None
    assert len(views.magnitudes_of(BASELINE).data) == 1


def test_names_of_sources_are_written_where_they_have_room():
    assert views.strongest_of(READING, "mlp", WIDE).data[0].texttemplate
    deep = token_weights(12, "full", 1, 40)
    reading = Reading(["a"] * 40, False, deep, READING.magnitudes)
    assert views.strongest_of(reading, "mlp", WIDE).data[0].texttemplate
    assert not views.strongest_of(reading, "mlp", NARROW).data[0].texttemplate


def test_layers_of_the_deepest_model():
    layouts = [layout_of(small_model(num_layers=layers)) for layers in (2, 3)]
    assert views.layers_of(layouts) == ["head", "3", "2", "1"]
