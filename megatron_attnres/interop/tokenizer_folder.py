"""The tokenizer of a Hugging Face folder: written from ours, or copied, and compared. No torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_attnres.data.configuration import TokenizerConfig
from megatron_attnres.data.tokenizers import Tokenizer, identity_of, load_tokenizer
from megatron_attnres.errors import InputError
from megatron_attnres.interop.folders import system_errors
from megatron_attnres.interop.sentencepiece_export import (
    SentencePieceModel,
    write_fast_tokenizer,
)

HUGGING_FACE = "HuggingFaceTokenizer"
# One of these is in every folder that has a tokenizer.
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
# What each tokenizer has pitfalls with: runs of spaces, tabs, line ends, U+2581, bytes, emoji,
# control characters, names of special pieces.
_PROBE = (
    "def f(x):\n\treturn  [x ** 2,\t\t-1]\n\n\n        # ▁ ▁▁x \u2581\n\r\n"
    + "".join(f"{' ' * count}x\n{' ' * count}\t" for count in range(40))
    + "naïve Ωmega 中文 🙂👩‍💻 \x00\x01\x7f\u200b\ufeff <s></s><unk><0x41> <|endoftext|> "
)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer of any kind."""
    return any((folder / name).is_file() for name in _FILES)


def write_tokenizer(
    tokenizer: Tokenizer, config: TokenizerConfig, folder: Path, max_length: int
) -> int | None:
    """Put the same tokenizer into a Hugging Face folder.

    Args:
        tokenizer: ours, SentencePiece's or Hugging Face's.
        config: where it was read from.
        folder: of the model.
        max_length: tokens that the model can read.

    Returns:
        The id that fills up short rows of a batch, if it has one.

    Raises:
        InputError: it cannot be done with the same ids.
        OSError: the folder cannot be written.
    """
    path = Path(str(config.tokenizer_model))
    if config.tokenizer_type == HUGGING_FACE:
        return copy_tokenizer(path, folder)
    model = SentencePieceModel(path)
    with system_errors():
        pad = write_fast_tokenizer(model, folder, model.pieces[tokenizer.eod], max_length)
    # Line ends keep what stands between them apart; a call for each would take minutes.
    with _quiet_transformers():
        _compare(tokenizer, folder, ["\n".join([*model.pieces, *model.overlaps()])])
    return pad


def copy_tokenizer(source: Path, target: Path) -> int | None:
    """Copy a Hugging Face tokenizer, by its own means.

    Args:
        source: folder that holds it.
        target: folder to hold it.

    Returns:
        The id that fills up short rows of a batch, if it has one.

    Raises:
        InputError: it cannot be read, or the copy makes other ids.
        OSError: the target cannot be written.
    """
    with _quiet_transformers():
        tokenizer = load_tokenizer(TokenizerConfig(HUGGING_FACE, str(source)))
        theirs = _read(source)
        with system_errors():
            theirs.save_pretrained(str(target))
        _compare(tokenizer, target, [])
    return theirs.pad_token_id


def _read(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False
    )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without the library's hints to those who load models, which is not done here."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _compare(ours: Tokenizer, folder: Path, texts: list[str]) -> None:
    """Refuse a tokenizer that was written with other ids than ours makes."""
    written = load_tokenizer(TokenizerConfig(HUGGING_FACE, str(folder)))
    same = identity_of(ours) == identity_of(written)
    if not same or any(ours.tokenize(text) != written.tokenize(text) for text in (_PROBE, *texts)):
        name = ours.unique_identifiers.get("tokenizer_model")
        raise InputError(
            f"--tokenizer-model {name}: as a fast tokenizer it makes other ids of some texts; give "
            "--without-tokenizer"
        )
