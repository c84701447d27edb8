"""Model FLOPs and what an accelerator could do."""

import pytest

from megatron_attnres.model.flops import training_flops
from megatron_attnres.training.throughput import model_tflops_per_rank, peak_tflops
from tests.layouts import small_model


def test_flops_of_the_average_rank():
    model = small_model()
    whole = model_tflops_per_rank(model, sequences=8, seconds=2.0, num_ranks=1)
    assert whole == pytest.approx(training_flops(model) * 4 / 1e12)
    assert model_tflops_per_rank(model, 8, 2.0, 4) == pytest.approx(whole / 4)
    assert model_tflops_per_rank(model, 8, 4.0, 1) == pytest.approx(whole / 2)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("AMD Instinct MI300X", 1307.0),
        ("NVIDIA H20", None),
        ("NVIDIA GeForce RTX 4090", None),
        (None, None),
    ],
)
def test_known_accelerators(name, peak):
    assert peak_tflops(None, "bf16", name) == peak
    assert peak_tflops(None, "fp32", name) is None, "the table is of bf16"


def test_what_is_given_wins():
    assert peak_tflops(100.0, "bf16", "NVIDIA H100 80GB HBM3") == 100.0
    assert peak_tflops(100.0, "fp32", None) == 100.0
