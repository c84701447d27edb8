"""Checkpoints that would run code: refused in one line, and the code does not run."""

import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import _create_read_item_for_byteio

from megatron_attnres.errors import InputError
from megatron_attnres.training.checkpoints.folders import (
    CHECKSUMS,
    METADATA,
    digest_of,
    folder_of,
    publish,
)
from megatron_attnres.training.checkpoints.safe_reader import SafeReader
from tests.training.checkpoints.test_layouts import LAYOUTS, Run, on
from tests.training.command import Finished
from tests.training.command import run as run_command

ONE = LAYOUTS["one"]
FORMATS = {"archive": True, "bare pickle": False}


class Attack:
    """Makes a folder as soon as it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


class Attribute:
    """Unpickled by ``getattr``."""

    def __init__(self, *arguments) -> None:
        self.arguments = arguments

    def __reduce__(self):
        return getattr, self.arguments


def save(folder):
    Run(ONE, 1, "fp32").save(folder, 1)


def load(folder):
    """What the project's loading says; None if all is well."""
    try:
        Run(ONE, 1, "fp32").load(folder)
    except InputError as error:
        return str(error)
    return None


def inspect(folder) -> Finished:
    """By the command, which reads tensors to compare them."""
    arguments = [str(folder), "--verify", "--diff", str(folder)]
    return run_command(arguments, command=(sys.executable, "tools/inspect_checkpoint.py"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of one checkpoint."""
    folder = tmp_path_factory.mktemp("saved")
    on(ONE, (save, folder))
    return folder_of(folder, 1)


@pytest.fixture
def tampered(saved, tmp_path):
    """Gives a copy whose files are replaced and whose sums are right."""

    def make(**contents: bytes) -> Path:
        final, writing = tmp_path / saved.name, tmp_path / "writing"
        shutil.copytree(saved, writing, ignore=shutil.ignore_patterns(CHECKSUMS))
        for name, content in contents.items():
            (writing / name).write_bytes(content)
        publish(writing, final, {path.name: digest_of(path) for path in writing.iterdir()})
        return final

    return make


def runs_code(attack, content: Path, marker: Path) -> bool:
    """Whether a reader that trusts its file runs the code in it."""
    attack(content)
    existed = marker.exists()
    marker.rmdir()
    return existed


def check_refused(folder, name, asked_for, marker):
    """By both readers, in one line that says which file asks for what."""
    [told] = on(ONE, (load, folder))
    answer = inspect(folder)
    assert (answer.status, answer.stdout) == (2, "")
    [line] = answer.stderr.splitlines()
    for text in (told, line):
        assert str(folder / name) in text
        assert f"asks for '{asked_for}'" in text
        assert "use a checkpoint whose origin you know" in text
        assert "\n" not in text
    assert not marker.exists()


def test_a_checkpoint_of_ours_is_read(saved):
    [told] = on(ONE, (load, saved))
    assert told is None
    answer = inspect(saved)
    assert answer.status == 0, answer.stderr


def test_a_description_is_read_as_torch_reads_it(saved):
    ours, torchs = SafeReader(saved), FileSystemReader(saved)
    torchs.load_id = ours.load_id
    found = ours.read_metadata()
    assert found == torchs.read_metadata()
    assert type(found) is Metadata
    assert len(found.state_dict_metadata) > 10


def test_a_description_that_runs_code(tampered, tmp_path):
    marker = tmp_path / "marker"
    folder = tampered(**{METADATA: pickle.dumps(Attack(marker))})
    assert runs_code(lambda path: pickle.loads(path.read_bytes()), folder / METADATA, marker)
    check_refused(folder, METADATA, "posix.mkdir", marker)


@pytest.mark.parametrize("as_archive", FORMATS.values(), ids=FORMATS)
def test_tensors_that_run_code(as_archive, saved, tampered, tmp_path):
    """The description is right, and says where in its file each tensor begins and ends."""
    marker = tmp_path / "marker"
    attack = tmp_path / "attack"
    torch.save(Attack(marker), attack, _use_new_zipfile_serialization=as_archive)
    [name] = [path.name for path in saved.glob("*.distcp")]
    metadata = FileSystemReader(saved).read_metadata()
    for stored in metadata.storage_data.values():
        stored.offset, stored.length = 0, attack.stat().st_size
    folder = tampered(**{name: attack.read_bytes(), METADATA: pickle.dumps(metadata)})
    assert runs_code(lambda path: torch.load(path, weights_only=False), folder / name, marker)
    check_refused(folder, name, "posix.mkdir", marker)


def refusal(folder: Path, content: bytes) -> str:
    (folder / METADATA).write_bytes(content)
    with pytest.raises(InputError) as caught:
        SafeReader(folder).read_metadata()
    assert str(folder / METADATA) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_name_with_line_ends_is_quoted_and_cut(tmp_path):
    name = "a\\nb" * 1000
    told = refusal(tmp_path, b"\x80\x04V" + name.encode() + b"\nVname\n\x93.")
    assert len(told) < len(str(tmp_path)) + 300


def test_a_class_is_not_changed(tmp_path):
    """The opcode that fills objects sets attributes of classes as well."""
    change = b"(N}X\x08\x00\x00\x00tamperedK\x01stb."
    named = f"\x80\x02c{Metadata.__module__}\nMetadata\n".encode("latin-1")
    pickle.loads(named + change)
    assert Metadata.tampered == 1, "torch's reader would do so"
    del Metadata.tampered
    assert "changes a class" in refusal(tmp_path, named + change)
    assert not hasattr(Metadata, "tampered")


@pytest.mark.parametrize("name", ["__init__", "mro"])
def test_an_attribute_is_no_way_to_other_objects(name, tmp_path):
    content = pickle.dumps(Metadata({}, planner_data=Attribute(Metadata, name)))
    assert callable(pickle.loads(content).planner_data)
    assert "attribute" in refusal(tmp_path, content)


def test_a_memory_format_may_be_an_attribute_of_its_enum(tmp_path):
    for member in _MEM_FORMAT_ENCODING:
        attribute = Attribute(_MEM_FORMAT_ENCODING, member.name)
        (tmp_path / METADATA).write_bytes(pickle.dumps(Metadata({}, planner_data=attribute)))
        assert SafeReader(tmp_path).read_metadata().planner_data is member


@pytest.mark.parametrize(
    "content", [b"", b"no pickle\n", b"\x80\x04", pickle.dumps({}), b"\x80\xff."]
)
def test_what_is_no_description_is_one_line(content, tmp_path):
    assert "cannot be read" in refusal(tmp_path, content)


def test_every_cut_of_a_description_is_one_line(saved, tmp_path):
    whole = (saved / METADATA).read_bytes()
    for length in range(0, len(whole), 101):
        assert "cannot be read" in refusal(tmp_path, whole[:length])


def test_a_file_outside_of_the_checkpoint_is_not_read(saved, tampered, tmp_path):
    metadata = FileSystemReader(saved).read_metadata()
    for stored in metadata.storage_data.values():
        shutil.copy(saved / stored.relative_path, tmp_path / "elsewhere")
        stored.relative_path = "../elsewhere"
    folder = tampered(**{METADATA: pickle.dumps(metadata)})
    [told] = on(ONE, (load, folder))
    assert "'../elsewhere', a file outside of the checkpoint" in told


def test_objects_are_not_read(saved):
    """Torch's planners unpickle them freely."""
    reader = SafeReader(saved)
    reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=False)
    index = next(iter(reader.storage_data))
    item = _create_read_item_for_byteio(MetadataIndex(index.fqn), 0, index, 0, 1)
    with pytest.raises(InputError, match="tensors are allowed"):
        reader.read_data(LoadPlan([item]), DefaultLoadPlanner())
