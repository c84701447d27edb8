"""A SentencePiece model from a corpus, made so that every text comes back exactly.

Source code decides the settings: nothing is normalised, no space is added or removed, characters
that are not in the vocabulary fall back to their bytes, and runs of spaces may be pieces.
"""

import io
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_attnres.data.corpora import Corpus
from megatron_attnres.data.files import written_at_once
from megatron_attnres.errors import InputError

ModelType = Literal["bpe", "unigram"]

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # a space, as SentencePiece writes it in a piece

# SentencePiece learns no piece across a line end and none with a tab. These are given to it: line
# ends together with the indentation that follows save one token in twelve on Python source.
_GIVEN_PIECES = ["\t"] + [
    line_ends + _SPACE * indent for line_ends in ("\n", "\n\n") for indent in (0, 4, 8, 12, 16)
]

_SPECIAL_PIECES = 3  # <unk>, <s>, </s>
SMALLEST_VOCABULARY = _SPECIAL_PIECES + 256 + len(_GIVEN_PIECES) + 1
"""Special pieces, the 256 bytes, the given pieces, and one to learn."""

# Share of the sample's characters that get a piece of their own; the rare rest is spelled in bytes.
_CHARACTER_COVERAGE = 0.9995

_LONGEST_LINE = 4096  # characters; longer ones are cut, where SentencePiece would drop them


@dataclass(frozen=True)
class TrainingSummary:
    """What a tokenizer was trained on, and how well it packs that.

    Attributes:
        documents: documents of the whole corpus.
        skipped_files, skipped_records, ignored_files: as in CorpusCounts.
        sample_bytes: UTF-8 bytes of the sampled lines that the model was trained on.
        tokens: tokens of that sample.
        bytes_per_token: their ratio.
        vocab_size: ids of the model.
        seconds: wall-clock time for everything.
        tokenizer_model: the file written.
    """

    documents: int
    skipped_files: int
    skipped_records: int
    ignored_files: int
    sample_bytes: int
    tokens: int
    bytes_per_token: float
    vocab_size: int
    seconds: float
    tokenizer_model: str


def train_tokenizer(
    corpus: Corpus,
    output: Path,
    vocab_size: int,
    model_type: ModelType = "bpe",
    max_bytes: int = 8_000_000,
    progress: Callable[[int], None] | None = None,
) -> TrainingSummary:
    """Train a SentencePiece model on an even sample of ``corpus``. Deterministic.

    Args:
        corpus: read once from beginning to end.
        output: the model file; ``.model`` is appended where it is missing.
        vocab_size: ids of the model, special and byte pieces included.
        model_type: SentencePiece's algorithm.
        max_bytes: the sample holds at most this many bytes of lines, and at least half as many
            where the corpus has them.
        progress: told the bytes read from disk so far.

    Raises:
        InputError: no document, or a vocabulary size that the sample cannot give.
    """
    from sentencepiece import SentencePieceProcessor

    started = time.monotonic()
    if vocab_size < SMALLEST_VOCABULARY:
        raise InputError(
            f"--vocab-size {vocab_size}: at least {SMALLEST_VOCABULARY} is allowed, for the bytes "
            "and special pieces"
        )
    sample = _even_sample(_lines(corpus, progress), max_bytes)
    corpus.require_documents()
    if not sample:
        raise InputError("--input: the documents hold nothing but line ends; text is needed")

    model = _train(sample, vocab_size, model_type)
    with written_at_once(output.with_name(output.name.removesuffix(".model") + ".model")) as file:
        file.write_bytes(model)

    processor = SentencePieceProcessor(model_proto=model)
    text = "\n".join(sample)
    # In slices, as one call would hold the ids of the whole sample as Python integers.
    tokens = sum(len(processor.encode(text[i : i + 65536])) for i in range(0, len(text), 65536))
    sample_bytes = len(text.encode("utf-8"))
    counts = corpus.counts
    return TrainingSummary(
        documents=counts.documents,
        skipped_files=counts.skipped_files,
        skipped_records=counts.skipped_records,
        ignored_files=counts.ignored_files,
        sample_bytes=sample_bytes,
        tokens=tokens,
        bytes_per_token=sample_bytes / tokens,
        vocab_size=processor.vocab_size(),
        seconds=time.monotonic() - started,
        tokenizer_model=str(output.with_name(output.name.removesuffix(".model") + ".model")),
    )


def _train(sample: list[str], vocab_size: int, model_type: ModelType) -> bytes:
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(sample),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            character_coverage=_CHARACTER_COVERAGE,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=_GIVEN_PIECES,
            max_sentence_length=4 * _LONGEST_LINE,  # in bytes
            minloglevel=2,
        )
    except RuntimeError as error:
        # "Vocabulary size too high (4096). Please set it to a value <= 812.", or too small
        # ("... is smaller than required_chars. 300 vs 371.").
        if limit := re.search(r"value <= (\d+)", str(error)):
            allowed = f"at most {limit[1]} is allowed for so little text"
        elif limit := re.search(r"required_chars\. \d+ vs (\d+)", str(error)):
            allowed = f"more than {limit[1]} is allowed, for the characters of the text"
        else:
            raise
        raise InputError(f"--vocab-size {vocab_size}: {allowed}") from None
    return model.getvalue()


def _lines(corpus: Corpus, progress: Callable[[int], None] | None) -> Iterator[str]:
    for passage in corpus:
        for line in passage.text.split("\n"):
            for start in range(0, len(line), _LONGEST_LINE):
                yield line[start : start + _LONGEST_LINE]
        if progress:
            progress(corpus.bytes_read)


def _even_sample(lines: Iterator[str], max_bytes: int) -> list[str]:
    """Keep every 2^k-th line, k being the least for which they hold at most ``max_bytes``.

    One pass over a corpus of unknown size: whenever the lines kept outgrow the bound, every other
    one goes, and twice as many are passed by from then on.
    """
    kept: list[str] = []
    held = 0
    stride = 1
    for number, line in enumerate(lines):
        if number % stride == 0:
            kept.append(line)
            held += len(line.encode("utf-8")) + 1
            while held > max_bytes and len(kept) > 1:
                kept = kept[::2]
                held = sum(len(line.encode("utf-8")) + 1 for line in kept)
                stride *= 2
    return kept
