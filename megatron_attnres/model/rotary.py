"""Rotary position embedding, the half-rotated form that Llama and Qwen use."""

import torch
from torch import Tensor


def rotary_tables(
    seq_length: int, kv_channels: int, base: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, each [seq_length, 1, 1, kv_channels]."""
    exponents = torch.arange(0, kv_channels, 2, dtype=torch.float32, device=device) / kv_channels
    positions = torch.arange(seq_length, dtype=torch.float32, device=device)
    angles = torch.outer(positions, base**-exponents)
    angles = torch.cat((angles, angles), dim=-1)[:, None, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotary_at(tables: tuple[Tensor, Tensor], start: int, tokens: int) -> tuple[Tensor, Tensor]:
    """The tables' part for positions start .. start + tokens - 1, each [tokens, 1, 1, kv_channels].

    Raises:
        ValueError: the tables have fewer positions.
    """
    cosines, sines = tables
    end = start + tokens
    if end > cosines.shape[0]:
        raise ValueError(
            f"a sequence of {end} tokens exceeds the {cosines.shape[0]} positions of the rotary "
            f"tables: shorten it or build the model with seq_length {end} or more"
        )
    return cosines[start:end], sines[start:end]


def apply_rotary(heads: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate [s, b, heads, kv_channels] by the positions of the tables, [s, 1, 1, kv_channels]."""
    cosines, sines = tables
    first, second = heads.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return heads * cosines + rotated * sines
