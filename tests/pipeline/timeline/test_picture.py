"""Pictures have the promised size, show what they name, and cost nothing until they are drawn."""

import subprocess
import sys

import pytest
from matplotlib.image import imread

from megatron_attnres.pipeline.timeline.picture import BUBBLE, LANE_COLOURS, draw_timeline
from tests.pipeline.timeline.examples import Example


def pixels(example, path):
    """The picture's data area, whole pixels of 0 to 255."""
    draw_timeline(example.step(), example.pipeline, path)
    picture = (imread(path)[:, :, :3] * 255).round().astype(int)
    assert picture.shape[1] == 1600
    # Below it are the axis and the legend.
    return picture[:-160]


def share(picture, colour):
    rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return (picture == rgb).all(axis=-1).mean()


def reddish(picture):
    red, green, blue = picture[:, :, 0], picture[:, :, 1], picture[:, :, 2]
    return ((red > 180) & (green < 180) & (blue < 180)).mean()


def test_exposed_communication_is_red_in_proportion(tmp_path):
    free, slow, slower = (
        pixels(Example(4, 2, 4, transfer=seconds), tmp_path / "picture.png")
        for seconds in (0.0, 0.002, 0.004)
    )
    assert reddish(free) == 0
    assert 0.001 < reddish(slow) < 0.7 * reddish(slower)


def test_a_pipeline_that_waits_is_grey(tmp_path):
    full, waiting = (
        pixels(Example(pipeline, 1, 4), tmp_path / "picture.png") for pipeline in (1, 4)
    )
    assert share(full, BUBBLE["facecolors"]) < 1e-3
    assert share(waiting, BUBBLE["facecolors"]) > 0.05


@pytest.mark.parametrize("early_relay", [True, False])
def test_only_lanes_that_occur_have_strips(tmp_path, early_relay):
    example = Example(4, 1, 4, transfer=0.004, early_relay=early_relay)
    picture = pixels(example, tmp_path / "picture.png")
    for (kind, _), colour in LANE_COLOURS.items():
        expected = early_relay or kind == "critical"
        assert (share(picture, colour) > 1e-3) == expected


def test_many_stages_and_no_time_at_all_can_be_drawn(tmp_path):
    tall = pixels(Example(16, 2, 16, jitter=0.1), tmp_path / "new" / "tall.png")
    assert 800 < tall.shape[0] < 1600
    pixels(Example(1, 1, 1, forward=0.0, backward=0.0), tmp_path / "flat.png")


def test_timelines_load_neither_torch_nor_matplotlib():
    names = ("chrome_trace", "parts", "picture", "report", "timeline_file")
    modules = ", ".join(f"megatron_attnres.pipeline.timeline.{name}" for name in names)
    check = f"import sys, {modules}; print({{'torch', 'matplotlib'}} & set(sys.modules))"
    command = [sys.executable, "-c", check]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "set()\n"
