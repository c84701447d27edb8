"""A lock is held as long as a process lives that has it, and no longer."""

import os
import subprocess
import time

import pytest

from megatron_attnres.errors import InputError
from megatron_attnres.training.sweeps.launching.local_lock import (
    is_locked,
    only_launcher,
    take_lock,
)
from megatron_attnres.training.sweeps.sweep_folder import SweepFolder


def test_a_lock_is_taken_once(tmp_path):
    path = tmp_path / "lock"
    assert not is_locked(path)
    descriptor = take_lock(path)
    assert descriptor is not None
    assert is_locked(path)
    assert take_lock(path) is None
    os.close(descriptor)
    assert not is_locked(path)


def test_looking_takes_nothing(tmp_path):
    path = tmp_path / "lock"
    path.touch()
    assert not is_locked(path)
    os.close(take_lock(path))


def test_it_stays_with_whoever_inherited_it(tmp_path):
    path = tmp_path / "lock"
    descriptor = take_lock(path)
    with subprocess.Popen(["sleep", "60"], pass_fds=(descriptor,)) as heir:
        os.close(descriptor)
        assert is_locked(path)
        heir.kill()
    assert not is_locked(path)


def test_whoever_did_not_inherit_it_does_not_hold_it(tmp_path):
    path = tmp_path / "lock"
    descriptor = take_lock(path)
    with subprocess.Popen(["sleep", "60"]) as stranger:
        os.close(descriptor)
        assert not is_locked(path)
        stranger.kill()


def test_the_second_launcher_is_told_of_the_first(tmp_path):
    folder = SweepFolder(tmp_path / "new" / "sweep")
    with only_launcher(folder):
        told = rf"process {os.getpid()}\) works on it"
        with pytest.raises(InputError, match=told), only_launcher(folder):
            pass
        assert is_locked(folder.launcher_lock)
    with only_launcher(folder):
        pass


def test_a_launcher_s_children_are_no_launchers(tmp_path):
    folder = SweepFolder(tmp_path)
    with only_launcher(folder):
        child = subprocess.Popen(["sleep", "60"])
    begin = time.monotonic()
    with only_launcher(folder):
        assert time.monotonic() - begin < 30
    child.kill()
    child.wait()


def test_a_folder_that_cannot_be_is_bad_input(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(InputError, match=r"--runs-dir .*file/sweep: .*; give a writable folder"),
        only_launcher(SweepFolder(tmp_path / "file" / "sweep")),
    ):
        pass
