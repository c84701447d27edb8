"""The report in a browser: hover and click as a reader does, and hold the numbers against JSON."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_attnres.analysis.depth.described import Subject
from megatron_attnres.analysis.depth.outputs import NUMBERS, REPORT, TOKEN_NUMBERS, write_outputs
from megatron_attnres.analysis.depth.records import table_of
from megatron_attnres.analysis.depth.report import report_page
from megatron_attnres.training.checkpoints.stored_model import StoredModel
from tests.analysis.browser import browser_page, cell_position, hover_text, needs_browser
from tests.analysis.depth.synthetic import NASTY, measurement_of, token_weights
from tests.layouts import small_model

pytestmark = needs_browser
MAP = "#map"
# Four places, of weights that are embedded as multiples of 1 / 65535.
SHOWN = 0.5e-4 + 1e-5


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The folder of a report on 5 layers in blocks of 3 sublayers, whose tokens are nasty."""
    folder = tmp_path_factory.mktemp("report")
    model = small_model(num_layers=5, block_size=3)
    stored = StoredModel("runs/<i>a</i>", Path("a"), model, None, {}, "fp32", 7, 70)
    weights = token_weights(5, "block", 3, len(NASTY))
    measurement = measurement_of(weights)
    write_outputs(folder, Subject(stored, "a & b", len(NASTY)), measurement, weights, NASTY)
    return folder


def numbers(folder, name):
    """By (layer, sublayer) the weights of every source."""
    readers = json.loads((folder / name).read_text())["readers"]
    return {(one["layer"], one["sublayer"]): one["weights"] for one in readers}


def weight_in(text):
    return float(re.search(r"(\d\.\d{4})", text)[1])


def background(page, token):
    button = page.locator("#tokens button").nth(token)
    return button.evaluate("button => button.style.backgroundColor")


def test_hover_and_clicks_show_what_the_numbers_say(report, tmp_path):
    means, of_tokens = numbers(report, NUMBERS), numbers(report, TOKEN_NUMBERS)
    with browser_page(viewport={"width": 1400, "height": 1000}) as (page, requests, errors):
        page.goto(f"file://{report / REPORT}")
        page.wait_for_selector(f"{MAP} .main-svg")
        assert page.locator("h1").text_content() == "runs/<i>a</i>, iteration 7"
        assert page.locator("#tokens button").all_text_contents()[:18] == NASTY[:18]

        text = hover_text(page, MAP, 3, 1)
        assert text.startswith("layer 4, attention; source: block 1")
        assert weight_in(text) == pytest.approx(means[4, "attention"]["block 1"], abs=SHOWN)
        text = hover_text(page, MAP, 5, 4)
        assert text.startswith("output head; source: block 4")
        assert weight_in(text) == pytest.approx(means[None, "head"]["block 4"], abs=SHOWN)

        page.click("text=pre-MLP")
        text = hover_text(page, MAP, 2, 2)
        assert text.startswith("layer 3, MLP; source: block 2 (partial sum)")
        assert weight_in(text) == pytest.approx(means[3, "mlp"]["block 2"], abs=SHOWN)

        page.locator("#tokens button").nth(9).click()
        assert page.locator("#shown").text_content() == "pre-MLP weights, token 10, <b>bold</b>"
        own = of_tokens[3, "mlp"]["block 2"]
        assert weight_in(hover_text(page, MAP, 2, 2)) == pytest.approx(own[9], abs=SHOWN)

        page.mouse.click(*cell_position(page, MAP, 2, 2))
        page.wait_for_function("document.getElementById('told').textContent")
        assert weight_in(page.locator("#told").text_content()) == pytest.approx(own[9], abs=SHOWN)
        titles = page.locator("#tokens button").evaluate_all("all => all.map(one => one.title)")
        assert [weight_in(title) for title in titles] == pytest.approx(own, abs=SHOWN)
        ranked = sorted(range(len(own)), key=own.__getitem__)
        # Yellow is more than violet: the red part tells.
        reds = [
            int(re.findall(r"\d+", background(page, one))[0]) for one in (ranked[0], ranked[-1])
        ]
        assert reds[0] != reds[1]
        page.screenshot(path=tmp_path / "report.png", full_page=True)

        # The cell that was chosen does not exist before attention in layer 3's first block.
        page.click("#mean")
        assert page.locator("#shown").text_content() == "pre-MLP weights, mean over all tokens"
        assert weight_in(hover_text(page, MAP, 2, 2)) == pytest.approx(
            means[3, "mlp"]["block 2"], abs=SHOWN
        )

        assert not page.locator("a[href*='//']").count()
        assert page.locator("[data-title*='loud'], [data-title*='hare']").count() == 0
        assert [one for one in requests if not one.startswith(("file://", "data:", "blob:"))] == []
        assert errors == []


def test_a_deep_model_in_full_mode_can_be_used(tmp_path):
    weights = token_weights(48, "full", 1, 32)
    means, magnitudes = table_of(weights.mean(), "attention"), measurement_of(weights).magnitudes
    report = tmp_path / REPORT
    report.write_text(report_page("deep", "", weights.mean(), weights, ["it"] * 32, magnitudes))
    with browser_page(viewport={"width": 1400, "height": 1400}) as (page, _, errors):
        page.goto(f"file://{report}")
        page.wait_for_selector(f"{MAP} .main-svg")
        for row, column, source in ((47, 94, "47 mlp"), (20, 7, "4 attn")):
            text = hover_text(page, MAP, row, column)
            assert text.startswith(f"layer {row + 1}, attention; source: {source}")
            assert weight_in(text) == pytest.approx(means[row, column], abs=SHOWN)
        page.screenshot(path=tmp_path / "deep.png", full_page=True)
        edges = page.locator(f"{MAP} .xtick text").evaluate_all(
            "all => all.map(one => one.getBoundingClientRect()).map(one => [one.left, one.right])"
        )
        assert len(edges) > 40
        assert all(one[1] <= other[0] + 1 for one, other in pairwise(sorted(edges)))
        assert errors == []
