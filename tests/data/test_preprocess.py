import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_attnres.data import files, readers
from megatron_attnres.data.configuration import TokenizerConfig
from megatron_attnres.data.corpora import Corpus
from megatron_attnres.data.preprocess import preprocess
from megatron_attnres.errors import InputError


def contents(prefix):
    return [open(prefix + suffix, "rb").read() for suffix in (".bin", ".idx")]


def test_every_document_comes_back(indexed, source_folders, tokenizer):
    dataset = IndexedDataset(indexed.output_prefix)
    documents = [passage.text for passage in Corpus(source_folders)]
    assert len(dataset) == len(documents) == indexed.documents
    for ids, text in zip(dataset, documents, strict=True):
        assert ids.dtype == np.uint16
        assert ids[-1] == tokenizer.eod
        assert tokenizer.detokenize(ids[:-1].tolist()) == text
    assert indexed.tokens == dataset.sequence_lengths.sum()
    assert indexed.text_bytes == sum(len(text.encode()) for text in documents)
    assert indexed.bytes_per_token == indexed.text_bytes / indexed.tokens > 2


def test_workers_do_not_change_the_output(tmp_path, indexed, source_folders, tokenizer_config):
    seen = []
    prefix = str(tmp_path / "parallel" / "corpus")
    corpus = Corpus(source_folders)
    summary = preprocess(corpus, tokenizer_config, prefix, workers=2, progress=seen.append)
    assert summary.output_prefix == prefix + "_text_document"
    assert contents(summary.output_prefix) == contents(indexed.output_prefix)
    assert seen == sorted(seen)
    assert seen[-1] <= corpus.bytes_read == corpus.bytes_on_disk


def test_without_end_of_document(tmp_path, source_folders, tokenizer, tokenizer_config):
    summary = preprocess(
        Corpus(source_folders[:1]), tokenizer_config, str(tmp_path / "c"), append_eod=False
    )
    for ids in IndexedDataset(summary.output_prefix):
        assert tokenizer.eod not in ids


def test_a_long_text_is_one_document_of_several_sequences(
    tmp_path, monkeypatch, tokenizer, tokenizer_config
):
    monkeypatch.setattr(readers, "PASSAGE_BYTES", 1000)
    text = "".join(f"line {i} of a long text\n" for i in range(300))
    (tmp_path / "in.txt").write_text(text)
    summary = preprocess(Corpus([tmp_path / "in.txt"]), tokenizer_config, str(tmp_path / "c"))
    dataset = IndexedDataset(summary.output_prefix)
    ids = np.concatenate(list(dataset))
    assert len(dataset) > 3
    assert summary.documents == len(dataset.document_indices) - 1 == 1
    assert (ids == tokenizer.eod).sum() == 1
    assert ids[-1] == tokenizer.eod
    assert tokenizer.detokenize(ids.tolist()) == text


def test_large_vocabularies_take_four_bytes_an_id(tmp_path):
    (tmp_path / "in.txt").write_text("70000 3")
    config = TokenizerConfig("NullTokenizer", vocab_size=80_000)
    summary = preprocess(Corpus([tmp_path / "in.txt"]), config, str(tmp_path / "c"))
    dataset = IndexedDataset(summary.output_prefix)
    (ids,) = dataset
    assert ids.dtype == np.int32
    assert ids.tolist() == [70_000, 3, 80_000]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("text", ["1 2 three", " \n", ""])
def test_bad_text_leaves_nothing_and_keeps_what_was_there(tmp_path, text, workers):
    (tmp_path / "in.txt").write_text(text)
    for suffix in (".bin", ".idx"):
        (tmp_path / f"out_text_document{suffix}").write_text("old")
    before = sorted(tmp_path.iterdir())
    config = TokenizerConfig("NullTokenizer", vocab_size=10)
    with pytest.raises(InputError):
        preprocess(Corpus([tmp_path / "in.txt"]), config, str(tmp_path / "out"), workers=workers)
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "out_text_document.bin").read_text() == "old"


def test_an_interrupt_leaves_nothing(tmp_path, source_folders, tokenizer_config):
    def interrupt(position):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preprocess(
            Corpus(source_folders), tokenizer_config, str(tmp_path / "out"), progress=interrupt
        )
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_cannot_be_written(tmp_path, source_folders, tokenizer_config):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "out_text_document.bin").mkdir()
    for prefix in (tmp_path / "file" / "out", tmp_path / "out"):
        with pytest.raises(InputError, match="output"):
            preprocess(Corpus(source_folders), tokenizer_config, str(prefix))


def test_several_files_appear_together(tmp_path):
    targets = (tmp_path / "a.v1.bin", tmp_path / "a.v1.idx")
    with files.written_at_once(*targets) as stem:
        for suffix in (".bin", ".idx"):
            stem.with_name(stem.name + suffix).write_text(suffix)
        assert not any(target.exists() for target in targets)
    assert [target.read_text() for target in targets] == [".bin", ".idx"]
    assert sorted(tmp_path.iterdir()) == list(targets)
