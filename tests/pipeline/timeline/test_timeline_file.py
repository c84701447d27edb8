"""Timelines come back from a file as they were; whatever else a file says is refused in a line."""

import json
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_attnres.errors import InputError
from megatron_attnres.pipeline.timeline.timeline_file import read_timelines, write_timelines
from tests.pipeline.timeline.examples import Example, all_timelines, changed

TIMELINES = Example(2, 2, 2, host=0.001, jitter=0.5, early_relay=True).timelines()


@given(all_timelines())
def test_what_was_written_is_read(timelines):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "new" / "timelines.json"
        write_timelines(path, timelines)
        assert read_timelines(path) == timelines
        assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_time_that_is_no_number_is_not_written(tmp_path):
    path = tmp_path / "timelines.json"
    write_timelines(path, TIMELINES)
    step = changed(TIMELINES.steps[0], "computes", 0, end=float("nan"))
    with pytest.raises(ValueError, match="JSON compliant"):
        write_timelines(path, replace(TIMELINES, steps=(step,)))
    assert read_timelines(path) == TIMELINES


@cache
def written():
    with tempfile.TemporaryDirectory() as folder:
        write_timelines(Path(folder) / "timelines.json", TIMELINES)
        return (Path(folder) / "timelines.json").read_text()


def content():
    return json.loads(written())


def refusal(path, text):
    """What reading says of it, without the file's name."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError) as raised:
        read_timelines(path)
    name, message = str(raised.value).split(": ", 1)
    assert name == str(path)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    "text",
    ["", "{", "\xff".encode("latin-1"), "[" * 100_000, "1" * 5000],
    ids=["empty", "cut", "bytes", "deep", "digits"],
)
def test_what_is_not_json_is_refused(tmp_path, text):
    assert refusal(tmp_path / "timelines.json", text).startswith("not JSON: ")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(InputError, match=f"{path}: .*; give a readable file"):
            read_timelines(path)


NO_SECONDS = "not a finite number of seconds"


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("format", "Chrome", 'format is "Chrome"; allowed: "megatron_attnres timelines"'),
        ("version", 2, "version is 2; allowed: 1"),
        ("version", True, "version is true; allowed: 1"),
        ("clock_error", None, f"clock_error is null, {NO_SECONDS}"),
        ("clock_error", -1.0, "clock_error is -1.0, below 0"),
        ("layout", [], "layout is [], not an object of fields"),
        ("layout layers_per_chunk", [1, 1, 1], "layout: 3 chunks do not divide over 2 ranks"),
        ("layout layers_per_chunk", [1, 0, 1, 1], "layout: layers per chunk (1, 0, 1, 1): only"),
        ("layout layers_per_chunk", [0, 0], "layout.layers_per_chunk has no layers"),
        ("layout layers_per_chunk", [1, -1], "layout.layers_per_chunk[1] is -1, not a whole"),
        ("layout pipeline_size", 0, "layout.pipeline_size is 0, not a whole number of at least 1"),
        ("layout block_size", 1.5, "layout.block_size is 1.5, not a whole number of at least 1"),
        ("layout policy", "none", 'layout.policy is "none"; allowed: "naive", "cached"'),
        ("layout early_relay", 1, "layout.early_relay is 1; allowed: true, false"),
        ("layout entry_bytes", "8", 'layout.entry_bytes is "8", not a whole number of at least 1'),
        ("steps", [], "steps is empty"),
        ("steps", {"0": 1}, 'steps is {"0": 1}, not a list'),
        ("steps 0", 7, "steps[0] is 7, not an object of fields"),
        ("steps 0 iteration", -1, "steps[0].iteration is -1, not a whole number of at least 0"),
        ("steps 0 ranks", [0], "steps[0].ranks has 1 for 2 pipeline stages"),
        ("steps 0 ranks", [3, 3], "steps[0].ranks names a rank twice"),
        ("steps 0 ranks", [0, "1"], 'steps[0].ranks is "1", not a whole number of at least 0'),
        ("steps 0 stages", [[0, 1]] * 3, "steps[0].stages has 3 for 2 pipeline stages"),
        ("steps 0 stages 0", [0], "steps[0].stages[0] has 1 values, not 2"),
        ("steps 0 stages 0", [2, 1], "steps[0].stages[0]: ends at 1.0 s, before its start at 2.0"),
        ("steps 0 stages 0 0", 9e-2, "steps[0]: stage 0: forward of chunk 0 for micro-batch 0, "),
        ("steps 0 computes 3 0", 2, "steps[0].computes[3]: stage is 2; allowed are 0 to 1"),
        ("steps 0 computes 3 0", True, "steps[0].computes[3]: stage is true; allowed are 0 to 1"),
        ("steps 0 computes 3 1", "up", 'steps[0].computes[3]: direction is "up"; allowed: "forw'),
        ("steps 0 computes 3 2", 4, "steps[0].computes[3]: chunk is 4; allowed are 0 to 3"),
        ("steps 0 computes 0 2", 1, "steps[0].computes[0]: chunk 1 is not on stage 0"),
        ("steps 0 computes 3 3", 2, "steps[0].computes[3]: micro-batch is 2; allowed are 0 to 1"),
        ("steps 0 computes 3 4", "0", f'steps[0].computes[3]: start is "0", {NO_SECONDS}'),
        ("steps 0 computes 3 4", True, f"steps[0].computes[3]: start is true, {NO_SECONDS}"),
        ("steps 0 computes 3 5", float("nan"), f"steps[0].computes[3]: end is NaN, {NO_SECONDS}"),
        ("steps 0 computes 3 5", 10**400, "steps[0].computes[3]: end is 1000"),
        ("steps 0 waits 1", [], "steps[0].waits[1] has 0 values, not 8"),
        ("steps 0 waits 0 0", 0, "steps[0].waits[0]: stage is 0; 1 is the message's receive"),
        ("steps 0 waits 0 1", "both", 'steps[0].waits[0]: side is "both"; allowed: "send", "rec'),
        ("steps 0 waits 0 3", 3, "steps[0].waits[0]: hop is 3; allowed are 0 to 2"),
        ("steps 0 waits 0 5", ["relay"], 'steps[0].waits[0]: kind is ["relay"]; allowed: "critica'),
        ("steps 0 transfers", "x" * 99, f'steps[0].transfers is "{"x" * 39}..., not a list'),
        ("steps 0 transfers", [], "steps[0]: stage 1: wait for forward hop 0-1 of micro-batch 0, "),
        ("steps 0 transfers 2", [1] * 8, "steps[0].transfers[2] has 8 values, not 9"),
        ("steps 0 transfers 2 4", 1.5, "steps[0].transfers[2]: bytes is 1.5, not a whole number"),
        ("steps 0 transfers 2 5", float("inf"), "steps[0].transfers[2]: send posted is Infinity,"),
        ("steps 0 transfers 2 8", -1, "steps[0].transfers[2]: ends at -1.0 s, before its start"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(tmp_path, place, value, said):
    changed_content = replaced(content(), place.split(), value)
    message = refusal(tmp_path / "timelines.json", json.dumps(changed_content))
    assert message.startswith(said)


@pytest.mark.parametrize(
    "place",
    ["format", "layout", "steps", "layout policy", "steps 0 transfers", "steps 0 iteration"],
)
def test_a_missing_field_is_named(tmp_path, place):
    *outer, name = place.split()
    whole = content()
    del inside(whole, outer)[name]
    dotted = place.replace(" 0", "[0]").replace(" ", ".")
    assert refusal(tmp_path / "timelines.json", json.dumps(whole)) == f"{dotted} is missing"


def test_hops_of_a_single_chunk_are_refused(tmp_path):
    whole = content()
    whole["layout"] |= {"layers_per_chunk": [4], "pipeline_size": 1}
    step = whole["steps"][0]
    step |= {"ranks": [0], "stages": [[0, 1]], "computes": [], "waits": []}
    message = refusal(tmp_path / "timelines.json", json.dumps(whole))
    assert message == "steps[0].transfers[0]: hop is 0; there is none"


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=3,
)


@given(st.data())
def test_any_change_is_read_or_refused_in_a_line(data):
    whole = content()
    places = list(all_places(whole))
    place = data.draw(st.sampled_from(places))
    value = data.draw(ANYTHING)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timelines.json"
        path.write_text(json.dumps(replaced(whole, place, value)))
        try:
            read_timelines(path)
        except InputError as error:
            assert str(error).startswith(f"{path}: ")
            assert "\n" not in str(error)


def all_places(value, place=()):
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield (*place, key)
            yield from all_places(inner, (*place, key))


def inside(whole, place):
    for key in place:
        whole = whole[int(key) if isinstance(whole, list) else key]
    return whole


def replaced(whole, place, value):
    *outer, last = place
    holder = inside(whole, outer)
    holder[int(last) if isinstance(holder, list) else last] = value
    return whole
