"""A corpus to a Megatron-Core indexed dataset: token ids in .bin, where documents lie in .idx.

This process reads the documents, worker processes encode them, and this process writes the ids in
the order of the documents, whatever the number of workers. A few batches per worker are under way
at a time, so memory does not grow with the corpus.
"""

import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from megatron_attnres.data.configuration import TokenizerConfig
from megatron_attnres.data.corpora import Corpus
from megatron_attnres.data.files import written_at_once
from megatron_attnres.data.readers import Passage
from megatron_attnres.data.tokenizers import Tokenizer, load_tokenizer
from megatron_attnres.errors import InputError

_BATCH_CHARACTERS = 1 << 18
_BATCHES_PER_WORKER = 4


@dataclass(frozen=True)
class PreprocessingSummary:
    """What was written.

    Attributes:
        documents: documents written; those without a token are not.
        tokens: ids in the .bin file, end-of-document ids included.
        text_bytes: UTF-8 bytes of the documents.
        bytes_per_token: their ratio.
        skipped_files, skipped_records, ignored_files: as in CorpusCounts.
        seconds: wall-clock time.
        output_prefix: of the .bin and .idx files; what ``--data-path`` takes.
    """

    documents: int
    tokens: int
    text_bytes: int
    bytes_per_token: float
    skipped_files: int
    skipped_records: int
    ignored_files: int
    seconds: float
    output_prefix: str


@dataclass(frozen=True, slots=True)
class _Encoded:
    """Token ids of one passage, and what must be known of its text."""

    ids: np.ndarray
    text_bytes: int
    ends_document: bool


def preprocess(
    corpus: Corpus,
    tokenizer_config: TokenizerConfig,
    output_prefix: str,
    append_eod: bool = True,
    workers: int = 1,
    progress: Callable[[int], None] | None = None,
) -> PreprocessingSummary:
    """Write ``<output_prefix>_<key>_document.bin`` and ``.idx``, Megatron's naming.

    Ids are uint16 for vocabularies below 65,500, else int32. A long text file makes one document
    of several sequences, with one end-of-document id after the last.

    Args:
        corpus: read once from beginning to end.
        tokenizer_config: loaded by every worker.
        output_prefix: path whose folder is made if missing.
        append_eod: end every document with the tokenizer's end-of-document id.
        workers: encoding processes; with 1 this process encodes itself.
        progress: told the bytes read from disk so far.

    Raises:
        InputError: no document, a bad tokenizer, an output that cannot be written. Then, and
            after an interrupt, no output is left.
    """
    started = time.monotonic()
    tokenizer = load_tokenizer(tokenizer_config)
    full_prefix = f"{output_prefix}_{corpus.key}_document"
    documents = tokens = text_bytes = 0

    with written_at_once(Path(full_prefix + ".bin"), Path(full_prefix + ".idx")) as stem:
        import torch

        indexed_dataset = _indexed_dataset_module()
        dtype = indexed_dataset.DType.optimal_dtype(tokenizer.vocab_size)
        builder = indexed_dataset.IndexedDatasetBuilder(f"{stem}.bin", dtype=dtype)
        with _encoder(tokenizer, tokenizer_config, workers) as encode:
            document_tokens = 0
            for passage in encode(corpus):
                ids = passage.ids.astype(dtype)
                if passage.ends_document and append_eod and document_tokens + ids.size:
                    ids = np.append(ids, dtype(tokenizer.eod))
                if ids.size:
                    builder.add_item(torch.from_numpy(ids))
                document_tokens += ids.size
                text_bytes += passage.text_bytes
                if passage.ends_document and document_tokens:
                    builder.end_document()
                    documents += 1
                    tokens += document_tokens
                    document_tokens = 0
                if progress:
                    progress(corpus.bytes_read)
        builder.finalize(f"{stem}.idx")
        corpus.require_documents()
        if not documents:
            raise InputError("--input: the documents hold no token; text is needed")

    counts = corpus.counts
    return PreprocessingSummary(
        documents=documents,
        tokens=tokens,
        text_bytes=text_bytes,
        bytes_per_token=text_bytes / tokens,
        skipped_files=counts.skipped_files,
        skipped_records=counts.skipped_records,
        ignored_files=counts.ignored_files,
        seconds=time.monotonic() - started,
        output_prefix=full_prefix,
    )


_Encode = Callable[[Iterable[Passage]], Iterator[_Encoded]]


@contextmanager
def _encoder(
    tokenizer: Tokenizer, tokenizer_config: TokenizerConfig, workers: int
) -> Iterator[_Encode]:
    """Give a function that encodes passages in order, in this process or in workers."""
    if workers == 1:
        yield lambda passages: (_encode(tokenizer, passage) for passage in passages)
        return
    # Spawned, not forked: this process has threads of torch and of a progress bar by now. An
    # executor, not a Pool: a Pool waits for ever for a worker that was killed.
    executor = ProcessPoolExecutor(
        workers, get_context("spawn"), initializer=_start_worker, initargs=(tokenizer_config,)
    )
    try:
        yield lambda passages: _encode_in_order(
            executor, _batches(passages), workers * _BATCHES_PER_WORKER
        )
    except BrokenProcessPool:
        raise InputError(
            f"--workers {workers}: a worker process ended unexpectedly, most often for lack of "
            "memory; fewer workers need less"
        ) from None
    finally:
        executor.shutdown(cancel_futures=True)


def _encode_in_order(
    executor: ProcessPoolExecutor, batches: Iterator[list[Passage]], most_under_way: int
) -> Iterator[_Encoded]:
    under_way: deque[Future[list[_Encoded]]] = deque()
    for batch in batches:
        with _ctrl_c_held_back():
            under_way.append(executor.submit(_encode_batch, batch))
        if len(under_way) == most_under_way:
            yield from under_way.popleft().result()
    while under_way:
        yield from under_way.popleft().result()


@contextmanager
def _ctrl_c_held_back() -> Iterator[None]:
    # Ctrl-C reaches every process of the terminal; this one alone answers it. Submitting may start
    # a worker, which inherits what is blocked from its first instruction on.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _batches(passages: Iterable[Passage]) -> Iterator[list[Passage]]:
    # Many small documents travel together, as a trip to a worker costs about a millisecond.
    batch: list[Passage] = []
    characters = 0
    for passage in passages:
        batch.append(passage)
        characters += len(passage.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode(tokenizer: Tokenizer, passage: Passage) -> _Encoded:
    ids = np.array(tokenizer.tokenize(passage.text), dtype=np.int32)
    return _Encoded(ids, len(passage.text.encode("utf-8")), passage.ends_document)


# In a worker process: its own tokenizer, loaded once.
_worker_tokenizer: Tokenizer


def _start_worker(tokenizer_config: TokenizerConfig) -> None:
    global _worker_tokenizer
    _worker_tokenizer = load_tokenizer(tokenizer_config)


def _encode_batch(batch: list[Passage]) -> list[_Encoded]:
    return [_encode(_worker_tokenizer, passage) for passage in batch]


def _indexed_dataset_module():  # noqa: ANN202 (a module; importing it takes seconds)
    with warnings.catch_warnings():
        # Megatron-Core names the GPU libraries that it does without; none has a part in this.
        warnings.filterwarnings("ignore", message=".*Apex.*")
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset
