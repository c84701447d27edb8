"""How much of an accelerator a run uses: model FLOPs and MFU. Pure arithmetic, no torch."""

from megatron_attnres.model.configuration import ModelConfig
from megatron_attnres.model.flops import training_flops
from megatron_attnres.optimizer.configuration import Precision

TERA = 1e12
# Dense bf16 matrix products, 10^12 operations a second, from the makers' data sheets. Names as
# torch.cuda.get_device_name() gives them; the first that is part of it counts.
BF16_TFLOPS = {
    "A100": 312.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "MI250X": 191.5,
    "MI300X": 1307.0,
    "MI325X": 1307.0,
}


def model_tflops_per_rank(
    model: ModelConfig, sequences: int, seconds: float, num_ranks: int
) -> float:
    """10^12 operations a second that training needs of the average rank; ``model/flops.py`` counts.

    Args:
        model: sizes.
        sequences: that all ranks trained on.
        seconds: that it took.
        num_ranks: of the job.
    """
    return training_flops(model) * sequences / seconds / num_ranks / TERA


def peak_tflops(given: float | None, precision: Precision, device_name: str | None) -> float | None:
    """What one accelerator can do, 10^12 operations a second; None if that is not known.

    Args:
        given: ``--peak-tflops``, which wins.
        precision: of the run; only bf16 is in the table.
        device_name: of the accelerator; None for a CPU.
    """
    if given is not None or precision != "bf16" or device_name is None:
        return given
    return next((peak for name, peak in BF16_TFLOPS.items() if name in device_name), None)
