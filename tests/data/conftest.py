"""A tokenizer, texts and an indexed dataset, made once from files of the standard library."""

from pathlib import Path

import pytest

from megatron_attnres.data.configuration import TokenizerConfig
from megatron_attnres.data.corpora import Corpus, standard_library_folder
from megatron_attnres.data.preprocess import preprocess
from megatron_attnres.data.tokenizer_training import train_tokenizer
from megatron_attnres.data.tokenizers import load_tokenizer

_FOLDERS = ("json", "email", "unittest", "logging")


@pytest.fixture(scope="session")
def source_folders():
    """Some 80 modules, about 1 MB."""
    return [standard_library_folder() / name for name in _FOLDERS]


@pytest.fixture(scope="session")
def tokenizer_config(tmp_path_factory, source_folders):
    model = tmp_path_factory.mktemp("tokenizer") / "pieces.model"
    train_tokenizer(Corpus(source_folders), model, vocab_size=1000)
    return TokenizerConfig("SentencePieceTokenizer", str(model))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_config):
    return load_tokenizer(tokenizer_config)


@pytest.fixture(scope="session")
def indexed(tmp_path_factory, source_folders, tokenizer_config):
    """Summary of a .bin / .idx pair of the source folders."""
    prefix = tmp_path_factory.mktemp("indexed") / "corpus"
    return preprocess(Corpus(source_folders), tokenizer_config, str(prefix))


@pytest.fixture
def copied_prefix(tmp_path, indexed):
    """The pair, copied: to be damaged."""
    for suffix in (".bin", ".idx"):
        data = Path(indexed.output_prefix + suffix).read_bytes()
        (tmp_path / f"copy{suffix}").write_bytes(data)
    return str(tmp_path / "copy")
