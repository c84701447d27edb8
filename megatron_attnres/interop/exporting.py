"""From a checkpoint to a Hugging Face folder, one file of tensors after the other."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_attnres.data.configuration import TokenizerConfig
from megatron_attnres.errors import InputError
from megatron_attnres.interop.folders import (
    check_new_folder,
    reading,
    system_errors,
    written_beside,
)
from megatron_attnres.interop.hf_config import (
    CONFIG_FILE,
    DTYPE_NAMES,
    MODELING,
    QWEN3_ARCHITECTURE,
    Precision,
    architecture_of,
    config_json,
    generation_json,
)
from megatron_attnres.interop.joining import split
from megatron_attnres.interop.names import Correspondence, Named, correspondences
from megatron_attnres.interop.report import Converted
from megatron_attnres.interop.tensor_files import INDEX_FILE, SINGLE_FILE
from megatron_attnres.interop.tokenizer_folder import write_tokenizer
from megatron_attnres.training.checkpoints.plans import WEIGHTS
from megatron_attnres.training.checkpoints.stored_checkpoint import StoredCheckpoint
from megatron_attnres.training.checkpoints.stored_model import StoredModel

MAX_FILE_BYTES = 5 * 10**9


def export_checkpoint(
    stored: StoredModel,
    save: str,
    precision: Precision | None = None,
    tokenizer: TokenizerConfig | None = None,
    with_tokenizer: bool = True,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Converted:
    """Write a folder that ``transformers`` loads. Memory holds one of its files at a time.

    Args:
        stored: the checkpoint.
        save: the folder, new.
        precision: of the tensors; None is that in which the model computed.
        tokenizer: where the model's tokenizer lies, if not where it lay in training.
        with_tokenizer: whether to write it.
        max_file_bytes: tensors of one file; more are spread over several.

    Raises:
        InputError: the checkpoint or its tokenizer cannot be read or written this way, or the
            folder cannot; nothing of it is left then.
    """
    check_new_folder(save)
    precision = precision or stored.precision
    found = correspondences(stored.model)
    with reading(stored.given):
        checkpoint = StoredCheckpoint(stored.folder)
        checkpoint.verify()
        _check_tensors(checkpoint, [one.ours for one in found])
    with written_beside(save) as folder:
        eos, pad, fate = _write_tokenizer(stored, tokenizer, with_tokenizer, folder)
        _write_json(folder / CONFIG_FILE, config_json(stored.model, precision, eos))
        _write_json(folder / "generation_config.json", generation_json(eos, pad))
        if architecture_of(stored.model) != QWEN3_ARCHITECTURE:
            name = f"{MODELING}.py"
            shutil.copyfile(Path(__file__).with_name(name), folder / name)
        _write_files(stored.given, checkpoint, found, precision, folder, max_file_bytes)
    return Converted(
        architecture_of(stored.model),
        sum(one.ours.numel for one in found),
        0,
        sum(len(one.theirs) for one in found),
        precision,
        fate,
        save,
    )


def _check_tensors(checkpoint: StoredCheckpoint, expected: Sequence[Named]) -> None:
    """Refuse a checkpoint that has less than the model needs, or more."""
    wanted = {f"{WEIGHTS}.{one.name}": one.shape for one in expected}
    stored = {name: one for name, one in checkpoint.tensors.items() if one.kind == WEIGHTS}
    if extra := sorted(stored.keys() - wanted.keys()):
        raise InputError(f"holds {', '.join(extra)}, which its model has no place for")
    for name, shape in wanted.items():
        if name not in stored:
            raise InputError(f"{name} is missing in the checkpoint")
        if stored[name].shape != shape:
            raise InputError(
                f"{name} is {stored[name].shape} in the checkpoint, {shape} in the model"
            )


def _write_tokenizer(
    stored: StoredModel, instead: TokenizerConfig | None, wanted: bool, folder: Path
) -> tuple[int | None, int | None, str]:
    """The id that ends a document, the one that fills up rows, and what became of the tokenizer."""
    config = instead or stored.tokenizer
    eos = stored.tokenizer_identity.get("eod")
    if not wanted:
        return eos, None, "none, as asked for"
    tokenizer = stored.open_tokenizer(instead)
    if config.tokenizer_type == "NullTokenizer":
        return tokenizer.eod, None, "none: the model's ids are numbers (NullTokenizer)"
    pad = write_tokenizer(tokenizer, config, folder, stored.model.seq_length)
    return tokenizer.eod, pad, f"of {config.tokenizer_model}"


def _write_files(
    given: str,
    checkpoint: StoredCheckpoint,
    found: Sequence[Correspondence],
    precision: Precision,
    folder: Path,
    max_file_bytes: int,
) -> None:
    dtype = getattr(torch, DTYPE_NAMES[precision])
    files = list(_files(found, dtype.itemsize, max_file_bytes))
    names = _file_names(len(files))
    for name, part in zip(names, files, strict=True):
        with reading(given):
            tensors = {
                theirs.name: tensor
                for one in part
                for theirs, tensor in zip(
                    one.theirs,
                    split(checkpoint.read(f"{WEIGHTS}.{one.ours.name}").to(dtype), one),
                    strict=True,
                )
            }
        with system_errors():
            save_file(tensors, folder / name, metadata={"format": "pt"})
        # Made for the owner alone.
        shutil.copymode(folder / CONFIG_FILE, folder / name)
    if len(files) > 1:
        _write_json(folder / INDEX_FILE, _index(names, files, dtype.itemsize))


def _files(
    found: Sequence[Correspondence], itemsize: int, max_file_bytes: int
) -> Iterator[list[Correspondence]]:
    """What goes into each file, in order; a tensor too large for one has one of its own."""
    part: list[Correspondence] = []
    size = 0
    for one in found:
        its_size = one.ours.numel * itemsize
        if part and size + its_size > max_file_bytes:
            yield part
            part, size = [], 0
        part.append(one)
        size += its_size
    yield part


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE_FILE]
    stem, _, suffix = SINGLE_FILE.partition(".")
    return [f"{stem}-{index:05d}-of-{count:05d}.{suffix}" for index in range(1, count + 1)]


def _index(
    names: Sequence[str], files: Sequence[Sequence[Correspondence]], itemsize: int
) -> dict[str, Any]:
    total = sum(one.ours.numel for part in files for one in part)
    places = {
        theirs.name: name
        for name, part in zip(names, files, strict=True)
        for one in part
        for theirs in one.theirs
    }
    return {"metadata": {"total_size": total * itemsize}, "weight_map": places}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
