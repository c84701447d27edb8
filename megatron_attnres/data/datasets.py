"""Training, validation and test samples, built by Megatron-Core from checked files.

What Megatron-Core leaves to chance is settled here first: files and shares are checked on every
rank alike, before its builders meet at a barrier where the failure of one rank would hang the rest.
"""

import copy
import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch.distributed
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from torch.utils.data import Dataset

from megatron_attnres.data.blends import SPLITS, Blend, parse_blend, parse_split, split_bounds
from megatron_attnres.data.configuration import DataConfig
from megatron_attnres.data.index_cache import check_indices, refuse_pickled_indices
from megatron_attnres.data.indexed_files import IndexedFiles, check_prefix
from megatron_attnres.data.tokenizers import Tokenizer
from megatron_attnres.errors import InputError
from megatron_attnres.parallel.agreement import same_error_on_all_ranks

SplitDatasets = tuple[Dataset | None, Dataset | None, Dataset | None]


def build_datasets(
    config: DataConfig,
    tokenizer: Tokenizer,
    seq_length: int,
    seed: int,
    num_samples: tuple[int, int, int],
    is_built_on_rank: Callable[[], bool] = lambda: True,
) -> SplitDatasets:
    """Build the training, validation and test datasets. Collective over all ranks.

    A sample is a dict with ``tokens`` and ``labels`` [seq_length] int64 and ``loss_mask``
    [seq_length] float32, and positions that nobody needs. Samples run over document ends, are
    shuffled by ``seed`` alone, and cover as many epochs as ``num_samples`` takes. Rank 0 builds the
    shuffled index on disk and the others read it: the cache folder must be shared between nodes.

    Args:
        config: blend, split and cache folder.
        tokenizer: whose ids the corpora hold.
        seq_length: tokens per sample.
        seed: of the shuffle.
        num_samples: at least so many samples of each split; None is returned for 0.
        is_built_on_rank: whether this rank reads samples; must hold on rank 0.

    Raises:
        InputError: files, blend, split or cache folder cannot be used, or a split is too short. The
            same on every rank that sees the same files.
    """
    blend = parse_blend(config.data_path)
    files = [check_prefix(prefix) for prefix in blend.prefixes]
    _require_samples(config.split, files, seq_length, num_samples)
    cache = _cache_folder(config, files)
    # Together: no rank looks while another one writes.
    with same_error_on_all_ranks() if torch.distributed.is_initialized() else nullcontext():
        check_indices(cache)
    refuse_pickled_indices()
    dataset_config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=_weighted(blend, files),
        split=config.split,
        path_to_cache=str(cache),
        tokenizer=tokenizer,  # only its eod, vocab_size and unique_identifiers are used
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    # Megatron-Core would look for one token in a split that nobody reads, for ever if it is empty.
    dataset_config.split_matrix = [
        bounds if samples else None
        for bounds, samples in zip(dataset_config.split_matrix, num_samples, strict=True)
    ]
    training, validation, test = _Builder(
        GPTDataset, list(num_samples), is_built_on_rank, dataset_config
    ).build()
    return training, validation, test


class _Builder(BlendedMegatronDatasetBuilder):
    """Builds blends without torch.distributed too, where BlendedDataset's cache asks for a rank."""

    @staticmethod
    def build_generic_dataset(
        cls: Any, is_built_on_rank: Callable[[], bool], synchronize_ranks: bool, *args: Any
    ) -> Any:
        """Build one dataset; see the base class."""
        if cls is BlendedDataset and not torch.distributed.is_initialized():
            uncached = copy.copy(args[-1])
            uncached.path_to_cache = None
            args = (*args[:-1], uncached)
        return BlendedMegatronDatasetBuilder.build_generic_dataset(
            cls, is_built_on_rank, synchronize_ranks, *args
        )


def _weighted(blend: Blend, files: list[IndexedFiles]) -> tuple[list[str], list[float] | None]:
    """Return the blend as Megatron-Core takes it.

    Several prefixes without weights are weighted by their tokens: Megatron-Core would draw one
    epoch at most from them, however many samples are asked for.
    """
    if len(blend.prefixes) == 1:
        return list(blend.prefixes), None
    weights = blend.weights or [float(pair.tokens) for pair in files]
    return list(blend.prefixes), list(weights)


def _require_samples(
    split: str, files: Iterable[IndexedFiles], seq_length: int, num_samples: tuple[int, int, int]
) -> None:
    """Raise InputError unless every corpus has a sample for every split that is asked for one."""
    shares = parse_split(split)
    needed = seq_length + 1  # the labels are the tokens one further on
    for name, share, samples in zip(SPLITS, shares, num_samples, strict=True):
        if samples and not share:
            raise InputError(
                f"--split {split}: no share for {name} data, of which {samples} samples are asked "
                "for; give it one"
            )
    for pair in files:
        bounds = split_bounds(split, len(pair.sequence_lengths))
        for name, (first, last), samples in zip(SPLITS, bounds, num_samples, strict=True):
            tokens = pair.tokens_between(first, last)
            if samples and tokens < needed:
                raise InputError(
                    f"--split {split}: the {name} share of {pair.prefix} is {last - first} of its "
                    f"{len(pair.sequence_lengths)} sequences with {tokens} tokens; at least "
                    f"{needed} (--seq-length and one) are needed: a larger share or corpus"
                )


def _cache_folder(config: DataConfig, files: list[IndexedFiles]) -> Path:
    """Return the folder of the shuffled index of exactly these files, made if missing.

    Megatron-Core names its cache files by path, seed, lengths and the like. A corpus that was
    preprocessed again to the same path would silently get the index of the old one, so the content
    of the .idx files decides on the folder.
    """
    if config.data_cache_path is None:
        base = Path(files[0].prefix).parent / "index_cache"
    else:
        base = Path(config.data_cache_path)
    contents = sha256("".join(pair.fingerprint() for pair in files).encode()).hexdigest()
    folder = base / contents[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror
    else:
        if os.access(folder, os.W_OK):
            return folder
        reason = "not writable"
    raise InputError(
        f"--data-cache-path {base}: {reason}; a folder that can be written is needed for the "
        "shuffled index"
    )
