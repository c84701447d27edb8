"""Imported once by the fork server of tests/distributed.py."""

import warnings

warnings.simplefilter("ignore")

from megatron_attnres.training.launch import import_for_ranks  # noqa: E402

import_for_ranks()

import torch  # noqa: E402

torch.set_num_threads(1)
