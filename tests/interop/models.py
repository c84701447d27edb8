"""One model on both sides: ours from a checkpoint, transformers' from a folder."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from megatron_attnres.evaluation.flags import JobFlags
from megatron_attnres.evaluation.job import build_trained, joined
from megatron_attnres.interop.importing import import_checkpoint
from megatron_attnres.interop.source import find_source
from megatron_attnres.model.gpt import GPTChunk
from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.training.checkpoints.stored_model import find_stored_model
from tests.model.test_inference import whole_logits

JOB = JobFlags(ParallelLayout(), None, None, timedelta(minutes=1))
LONG = 300


@contextmanager
def our_model(folder: Path) -> Iterator[GPTChunk]:
    """The whole model of a checkpoint, in float32."""
    with joined(JOB) as groups:
        stored = find_stored_model(str(folder))
        yield build_trained(stored, groups, "fp32").chunks[0].module


def our_logits(folder: Path, tokens: Tensor) -> Tensor:
    """[b, s, vocabulary]."""
    with our_model(folder) as model:
        return whole_logits(model, tokens).transpose(0, 1).contiguous()


def their_model(folder: Path) -> PreTrainedModel:
    """As a user loads it, in float32."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32
    )
    return model.eval()


@torch.no_grad()
def their_logits(folder: Path, tokens: Tensor) -> Tensor:
    """[b, s, vocabulary]."""
    return their_model(folder)(tokens).logits


def random_tokens(vocabulary: int, length: int, rows: int = 2) -> Tensor:
    """[rows, length]."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, vocabulary, (rows, length), generator=generator)


def qwen3_config(**changes: Any) -> Qwen3Config:
    """Of a small model whose heads are wider than a share of its hidden size."""
    return Qwen3Config(
        **{
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "rms_norm_eps": 1e-5,
            "initializer_range": 0.2,
            "tie_word_embeddings": False,
        }
        | changes
    )


def make_qwen3(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A folder with a Qwen3 model, random in every tensor."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(qwen3_config(**changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    model.to(dtype).save_pretrained(folder)
    return folder


def imported(folder: Path, save: Path, **options: Any) -> Path:
    """A checkpoint made of a folder."""
    import_checkpoint(find_source(str(folder)), str(save), **options)
    return save


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Of all safetensors files of a folder."""
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def change_tensors(folder: Path, tensors: Mapping[str, Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of a folder with one file."""
    changed = tensors_of(folder) | dict(tensors)
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, changes: Mapping[str, Any]) -> None:
    """Replace or add fields of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(changes)))
