"""Folders of checkpoints: whole or not there, checked, rotated, pointed at."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_attnres.errors import InputError
from megatron_attnres.training.checkpoints.folders import (
    digest_of,
    digests_in,
    folder_of,
    iterations_in,
    newest,
    point_at,
    publish,
    remove_unfinished,
    rotate,
    verify,
)

FILES = {"__0_0.distcp": bytes(range(256)) * 40, "run.json": b"{}", ".metadata": b"abc"}


def make(folder, iteration):
    """A whole checkpoint."""
    final = folder_of(str(folder), iteration)
    writing = final.with_name(final.name + ".writing")
    writing.mkdir(parents=True)
    for name, content in FILES.items():
        (writing / name).write_bytes(content)
    publish(writing, final, {name: digest_of(writing / name) for name in FILES})
    return final


def check(folder):
    digests = digests_in(folder)
    verify(folder, digests, digests)


def test_a_published_checkpoint_is_whole_and_the_newest(tmp_path):
    make(tmp_path, 3)
    final = make(tmp_path, 12)
    check(final)
    assert newest(str(tmp_path)) == final == newest(str(final))
    assert iterations_in(str(tmp_path)) == [3, 12]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000003",
        "iter_0000012",
        "latest",
    ]


def test_publishing_an_iteration_again_replaces_it(tmp_path):
    make(tmp_path, 3)
    (folder_of(str(tmp_path), 3) / "stray").write_text("old")
    assert not (make(tmp_path, 3) / "stray").exists()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_found_and_named(tmp_path_factory, data):
    final = make(tmp_path_factory.mktemp("damaged"), 1)
    path = data.draw(st.sampled_from(sorted(final.iterdir())))
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    kind = data.draw(st.sampled_from(["flip", "head", "tail", "gone"]))
    if kind == "flip":
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "head":
        content = content[:place]
    elif kind == "tail":
        content = content[place + 1 :]
    path.unlink() if kind == "gone" else path.write_bytes(content)
    with pytest.raises(InputError) as error:
        check(final)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("pointer", [b"", b"iter_0000009\n", b"\xff\x00\n", b"../", None])
def test_a_pointer_to_no_checkpoint(pointer, tmp_path):
    make(tmp_path, 1)
    (tmp_path / "latest").unlink()
    if pointer is not None:
        (tmp_path / "latest").write_bytes(pointer)
    with pytest.raises(InputError, match="latest") as error:
        check(newest(str(tmp_path)))
    assert "\n" not in str(error.value)


def test_a_killed_save_is_cleaned_up_and_the_one_before_stays(tmp_path):
    final = make(tmp_path, 3)
    (tmp_path / "iter_0000006.writing").mkdir()
    (tmp_path / "iter_0000006.writing" / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "latest.writing").write_text("iter_00")
    assert iterations_in(str(tmp_path)) == [3]
    remove_unfinished(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000003", "latest"]
    assert newest(str(tmp_path)) == final


@pytest.mark.parametrize(
    ("last", "every", "left"),
    [
        (None, None, [2, 4, 6, 8, 10]),
        (1, None, [10]),
        (2, None, [8, 10]),
        (1, 4, [4, 8, 10]),
        (9, None, [2, 4, 6, 8, 10]),
    ],
)
def test_rotation(last, every, left, tmp_path):
    for iteration in (2, 4, 6, 8, 10):
        make(tmp_path, iteration)
    rotate(str(tmp_path), last, every)
    assert iterations_in(str(tmp_path)) == left


def test_what_latest_names_is_not_rotated_away(tmp_path):
    """A run that went back to an older checkpoint writes lower iterations than it finds."""
    make(tmp_path, 8)
    older = make(tmp_path, 2)
    rotate(str(tmp_path), 1, None)
    assert newest(str(tmp_path)) == older
    point_at(older)
    check(older)
