"""Token ids from text and back, by SentencePiece, Hugging Face or no model at all.

Thin adapters over the two libraries: Megatron-Core's own wrappers would bring torch into every
worker process, which costs seconds, and may ask a hub.
"""

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from megatron_attnres.data.configuration import TokenizerConfig
from megatron_attnres.errors import InputError

# SentencePiece writes a space as this character inside its pieces, so a text that holds the
# character itself would come back with a space in its place.
_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"
# Two tokenizers that agree on this, and on their sizes, are taken for one.
_PROBE = (
    "The quick brown fox jumps over the lazy dog; 0123456789 = 3.14e-10?\n\tdef f(x):\n"
    "        return {'a': [x ** 2, \"b\"], 'naïve': Ω ≈ 中文 🙂}  # <s> </s> \r\n"
)


class Tokenizer(Protocol):
    """What the rest of the project, and Megatron-Core's GPTDataset, ask of a tokenizer.

    Attributes:
        vocab_size: every token id is below it.
        eod: the id that ends a document.
        unique_identifiers: names the tokenizer in the key of Megatron-Core's index cache.
    """

    vocab_size: int
    eod: int
    unique_identifiers: dict[str, str]

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of ``text``, without any special token around them."""
        ...

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``."""
        ...


def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Return the tokenizer that ``config`` names.

    Raises:
        InputError: a value is missing, or the model cannot be read or has no end-of-document id.
    """
    if config.tokenizer_type == "NullTokenizer":
        return NullTokenizer(config.vocab_size)
    if config.tokenizer_type == "SentencePieceTokenizer":
        return SentencePieceTokenizer(_model_path(config, "a SentencePiece .model file"))
    if config.tokenizer_type == "HuggingFaceTokenizer":
        return HuggingFaceTokenizer(_model_path(config, "a folder with a Hugging Face tokenizer"))
    raise InputError(
        f"--tokenizer-type {config.tokenizer_type}: allowed are SentencePieceTokenizer, "
        "HuggingFaceTokenizer, NullTokenizer"
    )


def identity_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """What tells a tokenizer from others, wherever its files lie and whichever library reads it.

    Returns:
        ``vocab_size``, ``eod``, and the SHA-256 of the ids of a probe text.
    """
    # Ids are their own text where there is no model.
    ids = [] if isinstance(tokenizer, NullTokenizer) else tokenizer.tokenize(_PROBE)
    return {
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "probe": sha256(json.dumps(list(ids)).encode()).hexdigest(),
    }


def padded_vocab_size(vocab_size: int, divisible_by: int) -> int:
    """Return the smallest multiple of ``divisible_by`` that holds ``vocab_size`` ids.

    The tensor-parallel size has no say: the embedding has the same shape in every layout, so
    that its initial weights, and the loss, do not depend on the layout. Choose ``divisible_by``
    as a multiple of every tensor-parallel size to be used.
    """
    return -(-vocab_size // divisible_by) * divisible_by


class SentencePieceTokenizer:
    """A SentencePiece model file."""

    def __init__(self, model: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        if not model.is_file():
            raise InputError(
                f"--tokenizer-model {model}: it is a folder; give a SentencePiece .model file, or "
                "--tokenizer-type HuggingFaceTokenizer"
            )
        try:
            self._processor = SentencePieceProcessor(model_file=str(model))
        except (OSError, RuntimeError):
            raise InputError(
                f"--tokenizer-model {model}: not a readable SentencePiece model; train one with "
                "tools/train_tokenizer.py"
            ) from None
        self.vocab_size: int = self._processor.vocab_size()
        self.eod: int = self._processor.eos_id()
        if self.eod < 0:
            raise InputError(
                f"--tokenizer-model {model}: it has no end-of-sentence piece to end documents "
                "with; train it with one"
            )
        self.unique_identifiers = {"class": type(self).__name__, "tokenizer_model": str(model)}
        self._space_mark_ids = self._ids_of_space_mark()

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of ``text``, without any special token around them."""
        if not self._space_mark_ids or _SPACE_MARK not in text:
            return self._processor.encode(text)
        first, *rest = self._processor.encode(text.split(_SPACE_MARK))
        for part in rest:
            first += self._space_mark_ids + part
        return first

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``; control pieces such as the end of document leave none."""
        return self._processor.decode(list(ids))

    def _ids_of_space_mark(self) -> list[int]:
        # The mark's UTF-8 bytes as byte pieces, where the model has them and puts no space of its
        # own before a text. Other models cannot keep the mark, and are used as they are.
        ids = [
            self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE_MARK.encode("utf-8")
        ]
        has_bytes = all(self._processor.is_byte(id_) for id_ in ids)
        adds_space = self._processor.encode("a") == self._processor.encode(" a")
        return ids if has_bytes and not adds_space else []


class HuggingFaceTokenizer:
    """A tokenizer folder as ``save_pretrained`` writes it. Never asks a hub."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        if not folder.is_dir():
            raise InputError(
                f"--tokenizer-model {folder}: it is a file; the folder of a Hugging Face tokenizer "
                "is allowed"
            )
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers raises whatever its parsers raise
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise InputError(
                f"--tokenizer-model {folder}: not a readable Hugging Face tokenizer ({reason[0]}); "
                "a folder with tokenizer.json is allowed"
            ) from None
        if self._tokenizer.eos_token_id is None:
            raise InputError(
                f"--tokenizer-model {folder}: it has no eos_token to end documents with; set one "
                "in its tokenizer_config.json"
            )
        # Not len(tokenizer): added tokens may leave gaps below the largest id.
        self.vocab_size: int = max(self._tokenizer.get_vocab().values()) + 1
        self.eod: int = self._tokenizer.eos_token_id
        self.unique_identifiers = {"class": type(self).__name__, "tokenizer_model": str(folder)}

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of ``text``, without any special token around them."""
        # verbose=False: a document longer than the model's context is no fault here.
        return self._tokenizer.encode(text, add_special_tokens=False, verbose=False)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, special tokens included."""
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


class NullTokenizer:
    """Ids as they are: the text ``"5 0 7"`` is the ids 5, 0, 7.

    As in Megatron, ``--vocab-size N`` stands for the ids 0 to N - 1, and N ends a document; the
    vocabulary has N + 1 ids.
    """

    def __init__(self, vocab_size: int | None) -> None:
        if vocab_size is None or vocab_size < 1:
            raise InputError(
                f"--vocab-size {vocab_size}: NullTokenizer needs the number of ids, at least 1"
            )
        self.vocab_size = vocab_size + 1
        self.eod = vocab_size
        self.unique_identifiers = {"class": type(self).__name__, "vocab_size": str(vocab_size)}

    def tokenize(self, text: str) -> list[int]:
        """Return the blank-separated ids of ``text``."""
        return [self._id(word) for word in text.split()]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return ``ids`` as blank-separated numbers."""
        return " ".join(map(str, ids))

    def _id(self, word: str) -> int:
        if word.isdecimal() and int(word) < self.eod:
            return int(word)
        raise InputError(
            f"--tokenizer-type NullTokenizer: the text holds {word[:40]!r}; allowed are whole "
            f"numbers below --vocab-size {self.eod}, separated by blanks"
        )


def _model_path(config: TokenizerConfig, allowed: str) -> Path:
    if config.tokenizer_model is None:
        raise InputError(
            f"--tokenizer-model: missing; --tokenizer-type {config.tokenizer_type} needs {allowed}"
        )
    path = Path(config.tokenizer_model)
    if not path.exists():
        raise InputError(f"--tokenizer-model {path}: no such file; {allowed} is allowed")
    return path
