"""Streamed text is the text of all ids, whatever the ids and the tokenizer."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceTrainer

from megatron_attnres.data.configuration import TokenizerConfig
from megatron_attnres.data.corpora import standard_library_folder
from megatron_attnres.data.tokenizers import load_tokenizer
from megatron_attnres.evaluation.generation.streaming import GrowingText, TextStream, TextUntil
from tests.evaluation.text import make_tokenizer

KINDS = ("own pieces", "dummy prefix", "byte-level", "llama-like", "numbers")
# Its decoder takes whole characters back where a wrong byte follows.
TAKES_BACK = "llama-like"
MARK = "\N{REPLACEMENT CHARACTER}"


def with_dummy_prefix(folder):
    """A SentencePiece model as others train them: with a space that only decoding drops again."""
    SentencePieceTrainer.train(
        input=str(standard_library_folder() / "json" / "decoder.py"),
        model_prefix=str(folder / "dummy"),
        vocab_size=400,
        byte_fallback=True,
        minloglevel=2,
    )
    return TokenizerConfig("SentencePieceTokenizer", str(folder / "dummy.model"))


def hugging_face(folder, llama_like):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    text = [(standard_library_folder() / "json" / "decoder.py").read_text(encoding="utf-8")]
    if llama_like:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        special = ["<unk>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<|end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    tokenizer.train_from_iterator(text, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    return TokenizerConfig("HuggingFaceTokenizer", str(folder))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    configs = (
        make_tokenizer(tmp_path_factory.mktemp("own")),
        with_dummy_prefix(tmp_path_factory.mktemp("dummy")),
        hugging_face(tmp_path_factory.mktemp("bytes"), llama_like=False),
        hugging_face(tmp_path_factory.mktemp("llama"), llama_like=True),
        TokenizerConfig("NullTokenizer", vocab_size=300),
    )
    return dict(zip(KINDS, map(load_tokenizer, configs), strict=True))


def prompts(tokenizer, kind):
    texts = ("", "7 8") if kind == "numbers" else ("", "def f(x", "  naïve 中 ", " ")
    ids = [list(tokenizer.tokenize(text)) for text in texts]
    return ids + [[tokenizer.eod, *one] for one in ids]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_pieces_make_the_text_of_all_ids(tokenizers, kind, data):
    tokenizer = tokenizers[kind]
    prompt = data.draw(st.sampled_from(prompts(tokenizer, kind)))
    # Byte pieces lie at the front: many characters are begun, few are finished.
    some = st.integers(0, tokenizer.vocab_size - 1) | st.integers(0, 262)
    ids = data.draw(st.lists(some, max_size=40))
    growing = GrowingText(tokenizer.detokenize, prompt)
    pieces = [growing.add(id_) for id_ in ids]
    before, whole = tokenizer.detokenize(prompt), tokenizer.detokenize([*prompt, *ids])
    if kind != TAKES_BACK or MARK not in whole:
        assert whole == before + "".join(pieces) + growing.rest()


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_whole_characters_do_not_wait(tokenizers, kind):
    tokenizer = tokenizers[kind]
    text = "naïve 中文 🙂 done"
    growing = GrowingText(tokenizer.detokenize, tokenizer.tokenize("def"))
    given_so_far = ""
    for id_ in tokenizer.tokenize(text):
        piece = growing.add(id_)
        assert MARK not in piece
        given_so_far += piece
    assert given_so_far.strip() == text
    assert growing.rest() == ""


@pytest.mark.parametrize("kind", KINDS[:-1])
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(text=st.text(st.sampled_from("ab \n") | st.characters(exclude_categories=["Cs"])))
def test_texts_come_back_in_pieces(tokenizers, kind, text):
    tokenizer = tokenizers[kind]
    prompt, ids = tokenizer.tokenize("x 中"), tokenizer.tokenize(text)
    growing = GrowingText(tokenizer.detokenize, prompt)
    pieces = [growing.add(id_) for id_ in ids]
    whole = tokenizer.detokenize([*prompt, *ids])
    assert whole == tokenizer.detokenize(prompt) + "".join(pieces) + growing.rest()


def test_a_wrong_byte_takes_nothing_back(tokenizers):
    tokenizer = tokenizers[TAKES_BACK]
    [*_, wrong] = (id_ for id_ in range(300) if tokenizer.detokenize([id_]) == MARK)
    ids = [*tokenizer.tokenize("中"), wrong, *tokenizer.tokenize("def")]
    growing = GrowingText(tokenizer.detokenize, tokenizer.tokenize("x"))
    assert "".join(map(growing.add, ids)).strip() == f"中{MARK} def"
    assert growing.rest() == ""


def test_only_a_few_ids_are_decoded_at_a_time(tokenizers):
    tokenizer, sizes = tokenizers["own pieces"], []

    def detokenize(ids):
        sizes.append(len(ids))
        return tokenizer.detokenize(ids)

    growing = GrowingText(detokenize, tokenizer.tokenize("import os\n" * 100))
    for id_ in tokenizer.tokenize("def f(x):\n    return 1\n" * 20):
        growing.add(id_)
    assert max(sizes[4:]) < 10


def test_a_stop_cuts_the_text_before_it():
    stream = TextStream(lambda ids: "".join(map(chr, ids)), [ord("?")], ["\n\n", "Q:"])
    pieces = [stream.add(ord(character)) for character in "?a\nb Q: c"]
    assert pieces == ["?", "a", "", "\nb", " ", "", "", "", ""]
    assert stream.stopped
    assert stream.rest() == ""


def test_what_only_began_like_a_stop_comes_out():
    until = TextUntil(["abcd"])
    assert [until.add("xab"), until.add("c"), until.rest()] == ["x", "", "abc"]
    assert not until.ended


letters = st.text("ab", max_size=12)


@given(letters, st.text("ab", min_size=1, max_size=3), st.lists(st.integers(1, 3), max_size=12))
def test_a_stop_is_found_however_the_text_comes(text, stop, lengths):
    until, start, out = TextUntil([stop]), 0, ""
    for length in [*lengths, len(text)]:
        out += until.add(text[start : start + length])
        start += length
    assert out + until.rest() == text.split(stop)[0]
    assert until.ended == (stop in text)


@given(letters, st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_nothing_before_a_stop_holds_one(text, stops):
    until = TextUntil(stops)
    out = "".join(map(until.add, text)) + until.rest()
    assert text.startswith(out)
    assert not any(stop in out for stop in stops)
    assert until.ended or out == text
