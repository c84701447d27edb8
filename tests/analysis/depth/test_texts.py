"""Texts from prompts, files and corpora, and what is refused."""

import json

import numpy as np
import pytest

from megatron_attnres.analysis.depth.texts import text_of_corpus, text_of_files, text_of_prompt
from megatron_attnres.data.tokenizers import NullTokenizer
from megatron_attnres.errors import InputError
from tests.training.command import make_corpus

TOKENIZER = NullTokenizer(60)


def refusal(function, *arguments):
    with pytest.raises(InputError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_prompt():
    assert text_of_prompt("5 0 7", TOKENIZER, 3).ids.tolist() == [5, 0, 7]
    assert "context 3" in refusal(text_of_prompt, "5 0 7 9", TOKENIZER, 3)
    assert "has 1 token;" in refusal(text_of_prompt, "5", TOKENIZER, 3)
    assert "has 0 tokens;" in refusal(text_of_prompt, "", TOKENIZER, 3)
    assert "--prompt: is not UTF-8" in refusal(text_of_prompt, "\udcff", TOKENIZER, 3)


def test_documents_end_between_files_and_records(tmp_path):
    plain, records = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("1 2 3\n")
    records.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("4 5", "6")))
    paths = [str(plain), str(records)]
    assert text_of_files(paths, TOKENIZER, 100).ids.tolist() == [1, 2, 3, 60, 4, 5, 60, 6]
    assert text_of_files(paths, TOKENIZER, 5).ids.tolist() == [1, 2, 3, 60, 4]


def test_files_that_cannot_be_used_are_named(tmp_path):
    missing, empty = tmp_path / "missing.txt", tmp_path / "empty.txt"
    binary, short = tmp_path / "binary.txt", tmp_path / "short.txt"
    empty.write_text("")
    binary.write_bytes(b"1 2 \xff")
    short.write_text("7")
    unknown = tmp_path / "text.pdf"
    unknown.write_bytes(b"%PDF")
    for path, why in (
        (missing, "no such file"),
        (unknown, "not a kind of file"),
        (empty, "no document found"),
        (binary, "no document found"),
        (short, "has 1 token"),
    ):
        message = refusal(text_of_files, [str(path)], TOKENIZER, 10)
        assert f"--text {path}" in message
        assert why in message


def test_a_corpus(tmp_path):
    prefix = make_corpus(tmp_path, 60)
    text = text_of_corpus(prefix, 61, 70)
    assert text.ids.dtype == np.int64
    assert len(text.ids) == 70
    assert text.ids[50] == 60
    assert "the model has 50" in refusal(text_of_corpus, prefix, 50, 70)
    assert "nowhere.idx does not exist" in refusal(text_of_corpus, "nowhere", 61, 70)
