"""Where text comes from. Plain data, no torch."""

from dataclasses import dataclass
from typing import Literal

TokenizerType = Literal["SentencePieceTokenizer", "HuggingFaceTokenizer", "NullTokenizer"]


@dataclass(frozen=True)
class TokenizerConfig:
    """Which tokenizer made the token ids.

    Attributes:
        tokenizer_type: Megatron's name. NullTokenizer needs ``vocab_size`` and no file: ids are
            given as they are.
        tokenizer_model: a SentencePiece ``.model`` file or a Hugging Face tokenizer's folder.
        vocab_size: for NullTokenizer only.
    """

    tokenizer_type: TokenizerType
    tokenizer_model: str | None = None
    vocab_size: int | None = None


@dataclass(frozen=True)
class DataConfig:
    """Indexed datasets to train on.

    Attributes:
        data_path: Megatron's blend: one ``.bin`` / ``.idx`` prefix, or weights and prefixes in
            turn (``0.3 a_text 0.7 b_text``), or several prefixes weighted by their size.
        split: comma-separated shares of train, validation and test, e.g. ``969,30,1``.
        data_cache_path: folder for the shuffled index, shared by all nodes; ``index_cache`` beside
            the first prefix if None.
        num_workers: processes that read ahead; 0 reads in the training process.
    """

    data_path: tuple[str, ...]
    split: str = "969,30,1"
    data_cache_path: str | None = None
    num_workers: int = 0
