"""The fast tokenizer made of a SentencePiece model: the same ids on any text, and the text back."""

import io
import json
import random
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceTrainer
from transformers import AutoTokenizer

from megatron_attnres.data.configuration import TokenizerConfig
from megatron_attnres.data.corpora import Corpus
from megatron_attnres.data.tokenizer_training import train_tokenizer
from megatron_attnres.data.tokenizers import identity_of, load_tokenizer
from megatron_attnres.errors import InputError
from megatron_attnres.interop.sentencepiece_export import SentencePieceModel
from megatron_attnres.interop.tokenizer_folder import copy_tokenizer, write_tokenizer

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
FILES = ["textwrap.py", "json/decoder.py", "heapq.py", "test/test_unicode_identifiers.py"]
OTHERS = ["tarfile.py", "test/test_unicodedata.py", "test/test_textwrap.py", "turtle.py"]
PITFALLS = [
    *" \t\n\r▁<>/s\x00\x01\x7f\u200b\ufeff\ufffdé中🙂",
    *("    ", "\n\n", "\n    ", "\n\n        ", "\t\t"),
    *("</s>", "<s>", "<unk>", "<0x41>", "👩‍💻", "e\u0301", "self", "return"),
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Ours, trained here; the fast one; both through the interface that they share."""
    folder = tmp_path_factory.mktemp("tokenizer")
    corpus = Corpus([str(LIBRARY / name) for name in FILES if (LIBRARY / name).is_file()])
    train_tokenizer(corpus, folder / "ours.model", 1200)
    config = TokenizerConfig("SentencePieceTokenizer", str(folder / "ours.model"))
    ours = load_tokenizer(config)
    (folder / "fast").mkdir()
    write_tokenizer(ours, config, folder / "fast", 128)
    fast = load_tokenizer(TokenizerConfig("HuggingFaceTokenizer", str(folder / "fast")))
    return ours, fast, folder


def check(ours, fast, text):
    ids = ours.tokenize(text)
    assert fast.tokenize(text) == ids, repr(text)
    assert fast.detokenize(ids) == text, repr(text)


@settings(max_examples=300)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text(tokenizers, text):
    check(*tokenizers[:2], text)


def test_texts_made_of_pitfalls_and_pieces(tokenizers):
    ours, fast, folder = tokenizers
    pieces = [p for p in SentencePieceModel(folder / "ours.model").pieces if p[:3] != "<0x"]
    draw = random.Random(0)
    for _ in range(5000):
        kinds = draw.choices((PITFALLS, pieces, " "), weights=(2, 2, 1), k=draw.randint(1, 12))
        check(ours, fast, "".join(draw.choice(kind) for kind in kinds))


@pytest.mark.parametrize("name", OTHERS)
def test_files_that_it_was_not_trained_on(tokenizers, name):
    path = LIBRARY / name
    if not path.is_file():
        pytest.skip(f"this Python has no {name}")
    check(*tokenizers[:2], path.read_text(encoding="utf-8", errors="replace"))


def test_it_is_the_same_tokenizer_to_us(tokenizers):
    ours, fast, _ = tokenizers
    assert identity_of(fast) == identity_of(ours)


def test_transformers_adds_nothing_and_pads_on_the_left(tokenizers):
    ours, _, folder = tokenizers
    theirs = AutoTokenizer.from_pretrained(folder / "fast")
    texts = ["x = 1", "def f(self):\n    return self"]
    batch = theirs(texts, padding=True)
    ids = [ours.tokenize(text) for text in texts]
    filler = len(ids[1]) - len(ids[0])
    assert batch["input_ids"] == [[0] * filler + ids[0], ids[1]]
    assert batch["attention_mask"][0] == [0] * filler + [1] * len(ids[0])
    assert (theirs.eos_token_id, theirs.bos_token_id) == (ours.eod, None)
    assert theirs.decode([*ids[0], ours.eod], skip_special_tokens=True) == texts[0]
    assert theirs.model_max_length == 128


def test_a_copy_is_the_same(tokenizers, tmp_path):
    ours, _, folder = tokenizers
    assert copy_tokenizer(folder / "fast", tmp_path / "copy") == 0
    copied = load_tokenizer(TokenizerConfig("HuggingFaceTokenizer", str(tmp_path / "copy")))
    assert identity_of(copied) == identity_of(ours)
    check(ours, copied, "</s> ▁ \n    x")


def spoiled(folder, **options):
    """A model trained with other options than ours."""
    text = (LIBRARY / FILES[0]).read_text(encoding="utf-8").split("\n")
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(text),
        model_writer=model,
        **{
            "vocab_size": 500,
            "model_type": "bpe",
            "byte_fallback": True,
            "normalization_rule_name": "identity",
            "add_dummy_prefix": False,
            "remove_extra_whitespaces": False,
            "minloglevel": 2,
        }
        | options,
    )
    path = folder / "other.model"
    path.write_bytes(model.getvalue())
    return TokenizerConfig("SentencePieceTokenizer", str(path))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"model_type": "unigram"}, "is no BPE model"),
        ({"byte_fallback": False, "vocab_size": 300}, "lacks pieces for bytes"),
        ({"normalization_rule_name": "nmt_nfkc"}, "normalises text"),
        ({"add_dummy_prefix": True}, "puts a space before a text"),
        ({"remove_extra_whitespaces": True}, "removes spaces"),
    ],
)
def test_models_that_are_not_exact_are_refused(options, reason, tmp_path):
    config = spoiled(tmp_path, **options)
    with pytest.raises(InputError, match=f"{reason}.*--without-tokenizer") as caught:
        write_tokenizer(load_tokenizer(config), config, tmp_path, 128)
    assert str(config.tokenizer_model) in str(caught.value)


def test_other_ids_are_noticed(tokenizers, tmp_path, monkeypatch):
    ours, _, folder = tokenizers
    config = TokenizerConfig("SentencePieceTokenizer", str(folder / "ours.model"))
    merges = SentencePieceModel.merges
    monkeypatch.setattr(SentencePieceModel, "merges", lambda self: merges(self)[1:])
    with pytest.raises(InputError, match="makes other ids"):
        write_tokenizer(ours, config, tmp_path, 128)
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["type"] == "BPE"
