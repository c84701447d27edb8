"""Imported once by the fork server of tests/distributed.py."""

import warnings

warnings.simplefilter("ignore")

import deepspeed  # noqa: E402, F401
import megatron.core.pipeline_parallel.schedules  # noqa: E402, F401
import torch  # noqa: E402

torch.set_num_threads(1)
