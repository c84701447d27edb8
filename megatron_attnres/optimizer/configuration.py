"""What the optimizer does. Plain data, no torch."""

from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp32", "bf16", "fp64"]
# Names of torch's data types, which need torch to be loaded.
DATA_TYPES: dict[Precision, str] = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}
BYTES_PER_ELEMENT: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp64": 8}
DecayStyle = Literal["constant", "linear", "cosine", "WSD"]
WsdDecayStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, ZeRO and the learning-rate schedule, under Megatron's names.

    Attributes:
        zero_stage: 1 shards optimizer state over data-parallel ranks (DeepSpeed), 0 replicates it.
        zero_cpu_offload: keep optimizer state in host memory (accelerator hosts only).
        precision: data type of parameters and activations; bf16 keeps fp32 master weights and
            accumulates gradients over micro-batches in fp32. fp64 is for tests.
        clip_grad: largest global gradient norm; 0 leaves gradients as they are.
        lr_warmup_iters, lr_decay_iters, lr_wsd_decay_iters: in iterations.
    """

    lr: float = 3e-4
    min_lr: float = 0.0
    lr_decay_style: DecayStyle = "cosine"
    lr_warmup_iters: int = 0
    lr_decay_iters: int = 1
    lr_wsd_decay_iters: int = 0
    lr_wsd_decay_style: WsdDecayStyle = "minus_sqrt"
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    zero_stage: Literal[0, 1] = 1
    zero_cpu_offload: bool = False
    precision: Precision = "fp32"
