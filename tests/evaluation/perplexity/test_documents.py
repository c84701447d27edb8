"""Documents to score: tokens, words and bytes, from text and from .bin files."""

import gzip
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_attnres.data.configuration import TokenizerConfig
from megatron_attnres.data.corpora import Corpus
from megatron_attnres.data.preprocess import preprocess
from megatron_attnres.data.readers import PASSAGE_BYTES
from megatron_attnres.data.tokenizers import load_tokenizer
from megatron_attnres.errors import InputError
from megatron_attnres.evaluation.comparison.settings import CorpusRequest
from megatron_attnres.evaluation.perplexity.documents import check_corpus, count_words, documents_of
from tests.evaluation.text import WIKITEXT, make_tokenizer, records_of

NULL = load_tokenizer(TokenizerConfig("NullTokenizer", vocab_size=60))
PAGES = [record["page"] for record in records_of(WIKITEXT)]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(config):
    return load_tokenizer(config)


def documents(tokenizer, **request):
    return list(documents_of(CorpusRequest(**request), tokenizer))


@given(st.text(st.sampled_from("ab \n\t\u2003\x1c"), min_size=1))
def test_words_are_counted_as_the_harness_counts_them(text):
    assert count_words(text) == len(re.split(r"\s+", text))


def test_text_is_read_like_any_corpus(tmp_path, tokenizer):
    with gzip.open(tmp_path / "pages.jsonl.gz", "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps({"page": page}) + "\n" for page in PAGES)
    found = documents(tokenizer, text=(str(tmp_path),), json_key="page")
    assert [one.tokens.tolist() for one in found] == [tokenizer.tokenize(page) for page in PAGES]
    assert [one.words for one in found] == [len(re.split(r"\s+", page)) for page in PAGES]
    assert [one.bytes for one in found] == [len(page.encode()) for page in PAGES]


def test_a_long_document_is_one_document(tmp_path):
    # Blank lines: stretches of white space that the passages cut in two.
    text = "5 7\n\n\n" * (PASSAGE_BYTES // 4)
    path = tmp_path / "long.txt"
    path.write_text(text, encoding="utf-8")
    assert sum(1 for _ in Corpus([path])) > 1
    (found,) = documents(NULL, text=(str(path),))
    assert found.tokens.tolist() == [5, 7] * (PASSAGE_BYTES // 4)
    assert found.words == count_words(text)
    assert found.bytes == len(text)


def test_of_a_long_document_no_more_is_read_than_is_wanted(tmp_path, monkeypatch):
    path = tmp_path / "long.txt"
    path.write_text("5 7\n\n\n" * PASSAGE_BYTES, encoding="utf-8")
    tokenize, read = NULL.tokenize, []
    monkeypatch.setattr(NULL, "tokenize", lambda text: read.append(len(text)) or tokenize(text))
    (found,) = documents(NULL, text=(str(path),), max_tokens=3)
    assert sum(read) < path.stat().st_size / 2
    assert found.tokens.tolist() == [5, 7, 5]
    assert (found.words, found.bytes) == (3, len("5 7 5"))


def test_indexed_documents_are_those_of_the_text(tmp_path, config, tokenizer):
    prefix = preprocess(Corpus([WIKITEXT], "page"), config, str(tmp_path / "pages")).output_prefix
    of_text = documents(tokenizer, text=(str(WIKITEXT),), json_key="page")
    of_ids = documents(tokenizer, data_path=prefix)
    for one, other in zip(of_text, of_ids, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert (one.words, one.bytes) == (other.words, other.bytes)


def test_big_corpora_can_be_cut(tokenizer):
    request = {"text": (str(WIKITEXT),), "json_key": "page"}
    whole = documents(tokenizer, **request)
    assert len(documents(tokenizer, max_documents=2, **request)) == 2
    wanted = len(whole[0].tokens) + 10
    first, cut = documents(tokenizer, max_tokens=wanted, **request)
    assert first.bytes == whole[0].bytes
    assert cut.tokens.tolist() == whole[1].tokens[:10].tolist()
    text = tokenizer.detokenize(cut.tokens.tolist())
    assert PAGES[1].startswith(text)
    assert (cut.words, cut.bytes) == (count_words(text), len(text.encode()))


def test_an_id_that_the_tokenizer_lacks_is_named(tmp_path):
    text = tmp_path / "ids.txt"
    text.write_text("3 70 5")
    wide = TokenizerConfig("NullTokenizer", vocab_size=100)
    prefix = preprocess(Corpus([text]), wide, str(tmp_path / "ids")).output_prefix
    with pytest.raises(InputError, match=f"--data-path {prefix}: .* token id 100; .* 0 to 60"):
        documents(NULL, data_path=prefix)


@pytest.mark.parametrize("content", ["", "  \n \n"])
def test_text_without_a_token_is_refused(tmp_path, content):
    path = tmp_path / "empty.txt"
    path.write_text(content)
    with pytest.raises(InputError, match=r"^--text") as error:
        documents(NULL, text=(str(path),))
    assert "\n" not in str(error.value)


def test_records_without_the_key_are_refused(tokenizer):
    with pytest.raises(InputError, match="--json-keys text"):
        documents(tokenizer, text=(str(WIKITEXT),))


def test_files_are_looked_for_before_anything_else(tmp_path):
    for request in ({"text": (str(tmp_path / "gone"),)}, {"data_path": str(tmp_path / "gone")}):
        flag = "--text" if "text" in request else "--data-path"
        with pytest.raises(InputError, match=f"^{flag} {tmp_path / 'gone'}"):
            check_corpus(CorpusRequest(**request))


def test_documents_of_no_sequence_are_passed_by(tmp_path):
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "ids.bin"), dtype=np.uint16)
    builder.end_document()
    builder.add_item(torch.tensor([4, 5]))
    builder.add_item(torch.tensor([6, 60]))
    builder.end_document()
    builder.finalize(str(tmp_path / "ids.idx"))
    (found,) = documents(NULL, data_path=str(tmp_path / "ids"))
    assert found.tokens.tolist() == [4, 5, 6]
