import pytest
import torch
from torch import nn

from megatron_attnres.errors import InputError
from megatron_attnres.optimizer.adamw import apex_is_installed
from megatron_attnres.optimizer.build import build_optimizer, check_zero_flags
from megatron_attnres.optimizer.configuration import OptimizerConfig


def test_zero_needs_fp32_masters():
    with pytest.raises(InputError, match="--zero-stage 1 with --precision fp64"):
        check_zero_flags(OptimizerConfig(zero_stage=1, precision="fp64"))


def test_offload_needs_zero():
    with pytest.raises(InputError, match="--zero-cpu-offload with --zero-stage 0"):
        check_zero_flags(OptimizerConfig(zero_stage=0, zero_cpu_offload=True))


def test_offload_needs_an_accelerator(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="accelerator"):
        check_zero_flags(OptimizerConfig(zero_cpu_offload=True))


def test_parameters_must_have_the_configured_type():
    config = OptimizerConfig(precision="bf16")
    with pytest.raises(ValueError, match=r"0\.weight is torch\.float32"):
        build_optimizer([nn.Linear(2, 2)], config, groups=None)
    with pytest.raises(ValueError, match="no trainable parameters"):
        build_optimizer([nn.Identity()], config, groups=None)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], False),
        (["apex/__init__.py"], False),  # the unrelated package of that name
        (["apex.py"], False),
        (["apex/__init__.py", "apex/optimizers/__init__.py"], False),  # built without CUDA
        (["apex/__init__.py", "apex/optimizers/__init__.py", "amp_C.py"], True),
    ],
)
def test_apex_is_known_by_what_it_exports(files, expected, tmp_path, monkeypatch):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("apex", "apex.optimizers", "amp_C"):
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    assert apex_is_installed() is expected
    for name in ("apex", "apex.optimizers", "amp_C"):
        __import__("sys").modules.pop(name, None)
