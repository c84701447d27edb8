import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_attnres.data.corpora import Corpus
from megatron_attnres.data.tokenizer_training import (
    SMALLEST_VOCABULARY,
    _even_sample,
    train_tokenizer,
)
from megatron_attnres.errors import InputError


def test_training_is_deterministic(tmp_path, source_folders):
    corpus = Corpus(source_folders[:1])
    first = train_tokenizer(corpus, tmp_path / "a", 400, max_bytes=20_000)
    second = train_tokenizer(corpus, tmp_path / "b.model", 400, max_bytes=20_000)
    assert (tmp_path / "a.model").read_bytes() == (tmp_path / "b.model").read_bytes()
    assert first.tokenizer_model == str(tmp_path / "a.model")
    assert second.vocab_size == 400
    assert first.documents == corpus.counts.documents
    assert 10_000 <= first.sample_bytes <= 20_000
    assert first.bytes_per_token == first.sample_bytes / first.tokens > 1.5


def test_unigram_models(tmp_path, source_folders):
    summary = train_tokenizer(
        Corpus(source_folders[:1]), tmp_path / "a.model", 400, "unigram", max_bytes=20_000
    )
    assert summary.vocab_size == 400


@pytest.mark.parametrize(
    ("vocab_size", "allowed"),
    [(1, f"at least {SMALLEST_VOCABULARY}"), (SMALLEST_VOCABULARY, "more than"), (9999, "at most")],
)
def test_impossible_vocabularies_leave_nothing(tmp_path, vocab_size, allowed):
    (tmp_path / "in.txt").write_text("A few words of English text, 12345.\n")
    with pytest.raises(InputError, match=f"--vocab-size {vocab_size}: {allowed}"):
        train_tokenizer(Corpus([tmp_path / "in.txt"]), tmp_path / "out.model", vocab_size)
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


@pytest.mark.parametrize("text", ["", "\n\n\n"])
def test_a_corpus_without_text_leaves_nothing(tmp_path, text):
    (tmp_path / "in.txt").write_text(text)
    with pytest.raises(InputError, match="--input"):
        train_tokenizer(Corpus([tmp_path / "in.txt"]), tmp_path / "out.model", 400)
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


@given(st.lists(st.text("aé", max_size=9)), st.integers(10, 200))
def test_samples_are_even_and_bounded(lines, max_bytes):
    sample = _even_sample(iter(lines), max_bytes)
    size = sum(len(line.encode()) + 1 for line in sample)
    assert size <= max_bytes or len(sample) <= 1
    strides = [2**k for k in range(12) if lines[:: 2**k] == sample]
    assert strides
