from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_attnres.data.batches import batches
from megatron_attnres.data.configuration import DataConfig, TokenizerConfig
from megatron_attnres.data.corpora import Corpus
from megatron_attnres.data.datasets import build_datasets
from megatron_attnres.data.indexed_files import check_prefix
from megatron_attnres.data.preprocess import preprocess
from megatron_attnres.data.token_ids import check_token_ids, id_range
from megatron_attnres.data.tokenizers import NullTokenizer
from megatron_attnres.errors import InputError
from tests.distributed import run_ranks

SEQ = 64


def build(tokenizer, cache, data_path, split="8,2", samples=(20, 6, 0), seed=1):
    config = DataConfig(tuple(data_path), split, str(cache))
    return build_datasets(config, tokenizer, SEQ, seed, samples)


def numbers(tmp_path, name, documents):
    """Make a pair of the given documents of ids below 10, and its tokenizer."""
    lines = "".join(f'{{"text": "{" ".join(map(str, ids))}"}}\n' for ids in documents)
    (tmp_path / f"{name}.jsonl").write_text(lines)
    config = TokenizerConfig("NullTokenizer", vocab_size=10)
    corpus = Corpus([tmp_path / f"{name}.jsonl"])
    return preprocess(corpus, config, str(tmp_path / name)).output_prefix


def test_samples_are_the_split_of_the_corpus(tmp_path, indexed, tokenizer):
    training, validation, test = build(tokenizer, tmp_path, [indexed.output_prefix])
    assert test is None
    assert len(training) >= 20
    assert len(validation) >= 6
    sample = training[0]
    assert sample["tokens"].shape == (SEQ,)
    assert sample["tokens"].dtype == torch.int64
    assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
    assert sample["loss_mask"].tolist() == [1.0] * SEQ

    # Held while its arrays are in use: they point into a file mapping that ends with it.
    corpus = IndexedDataset(indexed.output_prefix)

    def text(dataset):
        return np.concatenate([corpus[int(i)] for i in dataset.document_index]).tobytes()

    for dataset in (training, validation):
        everything = text(dataset)
        for i in range(0, len(dataset), 7):
            assert dataset[i]["tokens"].numpy().astype(np.uint16).tobytes() in everything
    assert not set(training.indices) & set(validation.indices)


def test_the_order_depends_on_the_seed(tmp_path, indexed, tokenizer):
    def first(seed, cache):
        training, _, _ = build(tokenizer, tmp_path / cache, [indexed.output_prefix], seed=seed)
        return next(batches(training, 0, 4, 0, 1))["tokens"]

    assert torch.equal(first(1, "a"), first(1, "b"))
    assert torch.equal(first(1, "a"), first(1, "a"))
    assert not torch.equal(first(1, "a"), first(2, "a"))


def test_more_samples_than_one_epoch_has(tmp_path):
    prefix = numbers(tmp_path, "few", [[i % 10] * 50 for i in range(6)])
    tokenizer = NullTokenizer(10)
    for data_path in ([prefix], [prefix, prefix], ["1", prefix, "2", prefix]):
        training, _, _ = build(tokenizer, tmp_path / "cache", data_path, "1", (100, 0, 0))
        assert len(training) >= 100
        assert len(list(batches(training, 0, 5, 0, 2))) == len(training) // 10


def test_blends_follow_their_weights(tmp_path):
    zeros = numbers(tmp_path, "zeros", [[0] * 99] * 40)
    ones = numbers(tmp_path, "ones", [[1] * 99] * 10)
    tokenizer = NullTokenizer(10)

    def share_of_ones(*data_path):
        training, _, _ = build(tokenizer, tmp_path / "cache", data_path, "1", (100, 0, 0))
        return np.mean([(training[i]["tokens"] == 1).any().item() for i in range(100)])

    assert share_of_ones("1", zeros, "1", ones) == pytest.approx(0.5, abs=0.02)
    assert share_of_ones(zeros, ones) == pytest.approx(0.2, abs=0.02)


def test_a_corpus_made_anew_gets_a_new_index(tmp_path):
    tokenizer = NullTokenizer(10)
    prefix = numbers(tmp_path, "c", [[3] * 200] * 4)
    build(tokenizer, tmp_path / "cache", [prefix], "1", (10, 0, 0))
    numbers(tmp_path, "c", [[4] * 90])
    training, _, _ = build(tokenizer, tmp_path / "cache", [prefix], "1", (10, 0, 0))
    assert all(set(training[i]["tokens"].tolist()) <= {4, 10} for i in range(10))


def test_the_cache_lies_beside_the_first_prefix(copied_prefix, tokenizer):
    build_datasets(DataConfig((copied_prefix,)), tokenizer, SEQ, 1, (1, 0, 0))
    assert list(Path(copied_prefix).parent.glob("index_cache/*/*description.txt"))


def test_too_short_splits_are_refused(tmp_path):
    tokenizer = NullTokenizer(10)
    prefix = numbers(tmp_path, "short", [[1] * 99] * 10 + [[1] * 9])
    for split, samples, reason in (
        ("10,1", (5, 1, 0), "validation share of .* 1 of its 11 sequences with 10 tokens"),
        ("1000,1", (5, 1, 0), "0 of its 11 sequences with 0 tokens"),
        ("1", (5, 1, 0), "no share for validation"),
        ("9,1,1", (5, 0, 1), "test share"),
    ):
        with pytest.raises(InputError, match=f"--split {split}: .*{reason}"):
            build(tokenizer, tmp_path / "cache", [prefix], split, samples)
    # A split that nobody reads may be as short as it likes.
    build(tokenizer, tmp_path / "cache", [prefix], "1000,1", (5, 0, 0))


def test_a_cache_folder_that_cannot_be_made(tmp_path, indexed, tokenizer):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--data-cache-path"):
        build(tokenizer, tmp_path / "file", [indexed.output_prefix])


def test_ids_beyond_the_vocabulary_are_named(indexed):
    prefix = indexed.output_prefix
    pair = check_prefix(prefix)
    tokens = np.concatenate(list(pair.chunks(0, pair.tokens)))
    largest = int(tokens.max())
    check_token_ids([prefix], largest + 1)
    with pytest.raises(
        InputError, match=f"{prefix}.bin holds the token id {largest}; .* {largest}"
    ):
        check_token_ids([prefix], largest)
    shares = [id_range(pair, rank, 3)[1] for rank in range(3)]
    assert max(shares) == largest


def test_negative_ids_are_named(tmp_path):
    prefix = numbers(tmp_path, "n", [[1] * 9])
    config = TokenizerConfig("NullTokenizer", vocab_size=70_000)
    preprocess(Corpus([tmp_path / "n.jsonl"]), config, str(tmp_path / "n"))
    data = np.fromfile(prefix + ".bin", dtype=np.int32)
    data[3] = -7
    data.tofile(prefix + ".bin")
    with pytest.raises(InputError, match="token id -7"):
        check_token_ids([prefix], 70_001)


def _read_on_this_rank(folder, prefix):
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    read = []
    tokenizer = NullTokenizer(10)
    # Three of a kind: one corpus, a blend, and a rank that reads nothing.
    for number, (data_path, reads) in enumerate(
        [((prefix,), True), (("1", prefix, "1", prefix), True), ((prefix,), rank == 0)]
    ):
        config = DataConfig(data_path, "8,2", f"{folder}/cache{number}")
        training, validation, test = build_datasets(
            config, tokenizer, SEQ, 1, (40, 8, 0), lambda reads=reads: reads
        )
        assert test is None
        assert (training is not None) == (validation is not None) == reads
        if reads:
            micro_batches = batches(training, 0, 2, rank, world_size)
            read.append([batch["tokens"].tolist() for batch in micro_batches])
    # Only one rank's share holds the wrong id, and all of them hear of it.
    with pytest.raises(InputError, match="token id 10"):
        check_token_ids([f"{folder}/last_text_document"], 10, rank, world_size)
    with pytest.raises(InputError, match="--split"):
        build_datasets(DataConfig((prefix,), "1"), tokenizer, SEQ, 1, (1, 1, 0))
    return read


def test_two_ranks_share_one_order(tmp_path):
    prefix = numbers(tmp_path, "c", [np.arange(200 + i) * i % 10 for i in range(20)])
    numbers(tmp_path, "last", [[1] * 99])
    by_rank = run_ranks(_read_on_this_rank, 2, str(tmp_path), prefix)
    for number, data_path in enumerate([[prefix], ["1", prefix, "1", prefix]]):
        micro_batches = list(zip(by_rank[0][number], by_rank[1][number], strict=True))
        assert len(micro_batches) > 9
        interleaved = [sample for pair in micro_batches for part in pair for sample in part]
        alone, _, _ = build(NullTokenizer(10), tmp_path / "alone", data_path, "8,2", (40, 8, 0))
        assert interleaved == [alone[i]["tokens"].tolist() for i in range(len(interleaved))]
