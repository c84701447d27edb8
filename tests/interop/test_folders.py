"""Where a conversion writes: any name that the system takes, whole or not at all."""

import errno
import resource
import signal
from contextlib import contextmanager

import pytest
import yaml

from megatron_attnres.errors import InputError
from megatron_attnres.interop.exporting import export_checkpoint
from megatron_attnres.interop.folders import check_new_folder, system_errors, written_beside
from megatron_attnres.interop.importing import import_checkpoint
from megatron_attnres.interop.model_flags import flags_yaml
from megatron_attnres.interop.source import find_source
from megatron_attnres.training.checkpoints.stored_model import find_stored_model
from tests.evaluation.checkpoints import make_checkpoint
from tests.interop.models import make_qwen3
from tests.layouts import small_model


@contextmanager
def files_of_at_most(num_bytes):
    """The system refuses to write more, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)


@pytest.mark.parametrize("name", ["x" * 250, "x" * 300, "no\udcffutf8"])
def test_names_that_cannot_be_written_are_refused_at_once(name, tmp_path):
    with pytest.raises(InputError, match="--save ") as caught:
        check_new_folder(str(tmp_path / name))
    str(caught.value).encode()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("there", [True, False])
def test_a_link_leads_to_the_folder_and_stays(there, tmp_path):
    link, target = tmp_path / "link", tmp_path / "elsewhere" / "target"
    link.symlink_to(target)
    if there:
        target.mkdir(parents=True)
    check_new_folder(str(link))
    with written_beside(str(link)) as folder:
        (folder / "file").write_text("x")
    assert link.is_symlink()
    assert [path.name for path in target.iterdir()] == ["file"]
    assert [path.name for path in target.parent.iterdir()] == ["target"]


@pytest.mark.parametrize("name", ["a b", "a\nseq-length: 1", "#'\"", "ü"])
def test_a_name_is_no_part_of_the_flags(name):
    model = small_model()
    flags = yaml.safe_load(flags_yaml(model, "fp32", None, f"/runs/{name}"))
    assert flags["seq-length"] == model.seq_length
    assert flags == yaml.safe_load(flags_yaml(model, "fp32", None, "plain"))


@pytest.mark.parametrize("num_bytes", [600, 5000])
def test_no_room_for_an_import_is_said_in_a_line(num_bytes, tmp_path):
    source = find_source(str(make_qwen3(tmp_path / "theirs")))
    save = str(tmp_path / "new" / "ours")
    with (
        files_of_at_most(num_bytes),
        pytest.raises(InputError, match=f"--save {save}: File too large; give") as caught,
    ):
        import_checkpoint(source, save)
    assert "\n" not in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"theirs"}


def test_no_room_for_an_export_is_said_in_a_line(tmp_path):
    make_checkpoint(tmp_path / "ours", small_model())
    stored, save = find_stored_model(str(tmp_path / "ours")), str(tmp_path / "new" / "theirs")
    with (
        files_of_at_most(5000),
        pytest.raises(InputError, match=f"--save {save}: File too large; give") as caught,
    ):
        export_checkpoint(stored, save, with_tokenizer=False)
    assert "\n" not in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"ours"}


def test_errors_of_the_system_in_a_text_are_known():
    with pytest.raises(OSError, match="No space left") as caught, system_errors():
        raise Exception("No space left on device (os error 28)")
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(ValueError, match="another"), system_errors():
        raise ValueError("another")
