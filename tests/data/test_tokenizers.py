import pickle

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_attnres.data.configuration import TokenizerConfig
from megatron_attnres.data.tokenizers import load_tokenizer, padded_vocab_size
from megatron_attnres.errors import InputError


@pytest.fixture(scope="session")
def hugging_face_folder(tmp_path_factory):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["def add(a, b):\n    return a + b\n"] * 3, trainer)
    folder = tmp_path_factory.mktemp("hf")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    return folder


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]))
    | st.text(" \n\t\r\0ab▁é<>/s", max_size=40)
    | st.sampled_from(["</s>", "<s><unk>", "<0x0A>", "\n\n        x", "a  b   c", "▁", "😀\ufeff"])
)
def test_sentencepiece_gives_every_text_back(tokenizer, text):
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text
    assert all(0 <= id_ < tokenizer.vocab_size for id_ in ids)
    assert tokenizer.eod not in ids


def test_sentencepiece_gives_source_files_back(tokenizer, source_folders):
    for path in sorted(source_folders[1].rglob("*.py")):
        text = path.read_bytes().decode("utf-8")
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_sentencepiece_packs_indentation(tokenizer):
    assert len(tokenizer.tokenize("\n        ")) == 1
    assert len(tokenizer.tokenize("\n\n    ")) == 1


def test_end_of_document_leaves_no_text(tokenizer):
    assert tokenizer.detokenize([*tokenizer.tokenize("a b"), tokenizer.eod]) == "a b"


def test_hugging_face_by_path(hugging_face_folder):
    config = TokenizerConfig("HuggingFaceTokenizer", str(hugging_face_folder))
    tokenizer = load_tokenizer(config)
    text = "def add(a,  b):\n\treturn é\n"
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text
    assert tokenizer.eod == 0
    assert max(ids) < tokenizer.vocab_size <= 300


def test_null_tokenizer_takes_ids_as_they_are():
    tokenizer = load_tokenizer(TokenizerConfig("NullTokenizer", vocab_size=10))
    assert tokenizer.tokenize(" 3 0\n9 ") == [3, 0, 9]
    assert tokenizer.detokenize([3, 0, 9]) == "3 0 9"
    assert (tokenizer.vocab_size, tokenizer.eod) == (11, 10)


@pytest.mark.parametrize("text", ["10", "-1", "a", "1.5", "²"])
def test_null_tokenizer_refuses_other_words(text):
    tokenizer = load_tokenizer(TokenizerConfig("NullTokenizer", vocab_size=10))
    with pytest.raises(InputError, match="below --vocab-size 10"):
        tokenizer.tokenize(f"1 {text}")


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "HuggingFaceTokenizer"])
def test_unusable_models_are_named(kind, tmp_path):
    garbage = tmp_path / "garbage.model"
    garbage.write_bytes(b"no model at all")
    empty = tmp_path / "empty.model"
    empty.write_bytes(b"")
    paths = [None, str(tmp_path / "missing"), str(garbage), str(empty), str(tmp_path)]
    for path in paths:
        with pytest.raises(InputError, match="--tokenizer-model") as error:
            load_tokenizer(TokenizerConfig(kind, path))
        assert "\n" not in str(error.value)
        assert path is None or path in str(error.value)


def test_null_tokenizer_needs_a_size():
    with pytest.raises(InputError, match="--vocab-size None"):
        load_tokenizer(TokenizerConfig("NullTokenizer"))


def test_input_errors_cross_processes():
    assert str(pickle.loads(pickle.dumps(InputError("one line")))) == "one line"


@given(st.integers(1, 10**6), st.integers(1, 2048))
def test_padded_vocab_size_is_the_least_multiple(size, divisor):
    padded = padded_vocab_size(size, divisor)
    assert padded % divisor == 0
    assert size <= padded < size + divisor
