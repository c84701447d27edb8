"""From a Hugging Face folder to a checkpoint, one tensor after the other.

Where the source does not read from depth and the model made of it shall, or where its output head
does not, readers are added that return the newest source at first: sources are the running hidden
state (``cumulative``), pseudo-queries are zero, and a bias on the newest source outweighs the rest.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_attnres.data.configuration import TokenizerConfig
from megatron_attnres.data.tokenizers import identity_of, load_tokenizer
from megatron_attnres.errors import InputError
from megatron_attnres.interop.folders import check_new_folder, reading, written_beside
from megatron_attnres.interop.hf_config import Precision
from megatron_attnres.interop.joining import joined
from megatron_attnres.interop.model_flags import FLAGS_FILE, flags_yaml
from megatron_attnres.interop.names import (
    EMBEDDING,
    RECENCY_BIAS,
    Correspondence,
    Shape,
    correspondences,
    reader_of,
)
from megatron_attnres.interop.report import Converted
from megatron_attnres.interop.source import HuggingFaceModel
from megatron_attnres.interop.tensor_files import TensorFiles
from megatron_attnres.interop.tokenizer_folder import HUGGING_FACE, copy_tokenizer, has_tokenizer
from megatron_attnres.model.configuration import AttnResConfig, ModelConfig
from megatron_attnres.training.checkpoints.description import (
    Description,
    TrainingState,
    model_identity,
)
from megatron_attnres.training.checkpoints.weights_writer import ComingTensor, write_weights

# Every other source's weight becomes exactly zero: an output head that reads the newest alone.
NEWEST_ALONE = 1e4
TOKENIZER_FOLDER = "tokenizer"
_NO_TOKENIZER = "none in the folder"
_LEFT_OUT = "none, as asked for"


def import_checkpoint(
    source: HuggingFaceModel,
    save: str,
    attn_res: AttnResConfig | None = None,
    with_tokenizer: bool = True,
) -> Converted:
    """Write a folder of checkpoints with one that ``--load-weights-only`` reads, and its flags.

    Args:
        source: the folder's model.
        save: the folder of checkpoints, new.
        attn_res: residual connections to give to a source that has standard ones; None keeps what
            it has.
        with_tokenizer: whether to take the folder's tokenizer along.

    Raises:
        InputError: the folder cannot be read or is not what its config.json says, or ``save``
            cannot be written; nothing of it is left then.
    """
    check_new_folder(save)
    found = correspondences(source.model, source.has_head_reader)
    theirs = [one for each in found for one in each.theirs]
    with reading(source.given):
        files = TensorFiles(source.folder)
        files.check(theirs, source.model.tied_embeddings)
    model = source.model if attn_res is None else replace(source.model, attn_res=attn_res)
    precision = source.precision or _precision_of(files)
    tensors = _coming_tensors(source, files, found, model)
    with written_beside(save) as folder:
        tokenizer, identity, fate = _take_tokenizer(source, save, with_tokenizer, folder)
        (folder / FLAGS_FILE).write_text(
            flags_yaml(model, precision, tokenizer, save), encoding="utf-8"
        )
        write_weights(folder, _description(model, precision, tokenizer, identity), tensors)
    converted = sum(one.numel for one in theirs)
    whole = sum(one.ours.numel for one in correspondences(model))
    return Converted(
        source.architecture, converted, whole - converted, len(theirs), precision, fate, save
    )


def _precision_of(files: TensorFiles) -> Precision:
    return "bf16" if files.data_types[EMBEDDING] == "BF16" else "fp32"


def _coming_tensors(
    source: HuggingFaceModel,
    files: TensorFiles,
    found: list[Correspondence],
    model: ModelConfig,
) -> dict[str, ComingTensor]:
    """Every tensor of the model: from the folder, or a constant for readers that it has not."""
    stored = {one.ours.name: one for one in found}
    bias = NEWEST_ALONE if source.reads_newest_twice else model.attn_res.recency_bias
    read_twice = _read_twice(model) if source.reads_newest_twice else set()
    coming = {}
    for name, shape in ((one.ours.name, one.ours.shape) for one in correspondences(model)):
        if name not in stored:
            make: Callable[[], Tensor] = partial(_neutral, name, shape, bias)
        elif name in read_twice:
            make = partial(_bias_of_one, source.given, files, stored[name])
        else:
            make = partial(_read, source.given, files, stored[name])
        coming[name] = ComingTensor(shape, make)
    return coming


def _read_twice(model: ModelConfig) -> set[str]:
    """The biases of the sublayers that begin a block."""
    firsts = range(0, model.num_sublayers, model.attn_res.block_size)
    return {f"{reader_of(model, sublayer)}.{RECENCY_BIAS}" for sublayer in firsts}


def _read(given: str, files: TensorFiles, one: Correspondence) -> Tensor:
    with reading(given):
        return joined([files.read(theirs.name) for theirs in one.theirs], one)


def _bias_of_one(given: str, files: TensorFiles, one: Correspondence) -> Tensor:
    """The bias with which one read of the newest source does what two reads of it do.

    With logit l and bias b on the second of the two, e^l + e^(l + b) = e^(l + log(1 + e^b)).
    """
    bias = _read(given, files, one).double()
    return torch.logaddexp(bias, torch.zeros_like(bias)).float()


def _neutral(name: str, shape: Shape, bias: float) -> Tensor:
    """A tensor of a reader that returns the newest source."""
    value = {"query": 0.0, "key_norm_weight": 1.0, RECENCY_BIAS: bias}[name.rpartition(".")[2]]
    return torch.full(shape, value)


def _take_tokenizer(
    source: HuggingFaceModel, save: str, wanted: bool, folder: Path
) -> tuple[TokenizerConfig | None, dict[str, Any], str]:
    """Where the tokenizer will lie, what tells it from others, and what became of it."""
    if not wanted:
        return None, {}, _LEFT_OUT
    if not has_tokenizer(source.folder):
        return None, {}, _NO_TOKENIZER
    try:
        copy_tokenizer(source.folder, folder / TOKENIZER_FOLDER)
        tokenizer = load_tokenizer(TokenizerConfig(HUGGING_FACE, str(folder / TOKENIZER_FOLDER)))
    except InputError as error:
        raise InputError(f"--load {source.given}: {error}; or give --without-tokenizer") from error
    if tokenizer.vocab_size > source.model.vocab_size:
        raise InputError(
            f"--load {source.given}: its tokenizer has {tokenizer.vocab_size} ids, config.json has "
            f"vocab_size {source.model.vocab_size}; give --without-tokenizer"
        )
    final = str(Path(save) / TOKENIZER_FOLDER)
    return TokenizerConfig(HUGGING_FACE, final), identity_of(tokenizer), f"copied to {final}"


def _description(
    model: ModelConfig,
    precision: Precision,
    tokenizer: TokenizerConfig | None,
    identity: dict[str, Any],
) -> Description:
    """Of a checkpoint that no run has written."""
    configuration = {
        "model": asdict(model),
        "tokenizer": None if tokenizer is None else asdict(tokenizer),
        "optimizer": {"precision": precision},
    }
    return Description(
        state=TrainingState(),
        optimizer_steps=0,
        scheduler={},
        model=model_identity(model),
        data={},
        order="",
        tokenizer=identity,
        configuration=configuration,
        plan_digest="",
    )
