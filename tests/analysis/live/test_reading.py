"""Live models: what is read of a text, and one thread at a time."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.analysis.live.trained import CONTEXT, live_models


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    with live_models(tmp_path_factory.mktemp("checkpoints")) as models:
        yield models


def test_a_text_that_fits(models):
    block, baseline = models
    reading = block.read("a b")
    assert (reading.texts, reading.cut) == (["a", "␣", "b"], False)
    assert all(one.shape[1] == 3 for one in reading.weights.weights)
    np.testing.assert_allclose([one.sum(axis=0) for one in reading.weights.weights], 1, atol=1e-6)
    assert reading.magnitudes.predictions == 2
    assert baseline.read("a b").weights is None
    assert baseline.read("a b").magnitudes.output.shape == (3,)


def test_of_a_long_text_the_end_is_read(models):
    text = "".join(chr(97 + index % 26) for index in range(10 * CONTEXT))
    for long in (text, "中" * 10**6 + text):
        reading = models[0].read(long)
        assert reading.cut
        assert "".join(reading.texts) == text[-CONTEXT:]


def test_texts_that_are_none(models):
    assert models[0].read("") is None
    assert models[0].read("\ud800").texts == ["?"]


def test_one_token_has_no_loss(models):
    magnitudes = models[0].read("a").magnitudes
    assert (magnitudes.loss, magnitudes.gradient) == (None, None)


def test_threads_take_turns(models):
    computing, most = set(), []

    def begin(module, inputs):
        computing.add(module)
        most.append(len(computing))
        time.sleep(0.002)

    def end(module, inputs, output):
        computing.discard(module)

    hooks = []
    for model in models:
        hooks += [model._module.register_forward_pre_hook(begin)]
        hooks += [model._module.register_forward_hook(end)]
    texts = [f"text {index}" for index in range(12)]
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda text: [model.read(text) for model in models], texts))
    for hook in hooks:
        hook.remove()
    assert max(most) == 1
    for text, (block, baseline) in zip(texts, answers, strict=True):
        assert "".join(block.texts) == text.replace(" ", "␣") == "".join(baseline.texts)
        # Again, alone: the same numbers.
        alone = models[0]._read(text)
        for one, other in zip(block.weights.weights, alone.weights.weights, strict=True):
            np.testing.assert_array_equal(one, other)
