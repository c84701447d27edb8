"""Tokens as text: nothing hidden, nothing that acts, no character lost."""

import unicodedata

from megatron_attnres.analysis.depth.token_texts import shortened, token_texts, visible
from megatron_attnres.data.tokenizers import NullTokenizer
from tests.analysis.byte_tokenizer import ByteTokenizer


def test_bytes_of_a_character_stand_together():
    tokenizer = ByteTokenizer()
    texts = token_texts(tokenizer, tokenizer.tokenize("aé中🙂b"))
    assert texts == ["a", "é", "…", "中", "…", "…", "🙂", "…", "…", "…", "b"]


def test_blanks_stay():
    tokenizer = ByteTokenizer()
    assert "".join(token_texts(tokenizer, tokenizer.tokenize("a b\n\tc"))) == "a␣b↵⇥c"


def test_broken_characters_and_tokens_without_text_are_named():
    texts = token_texts(ByteTokenizer(), [0x61, 0xFF, 0x62, 0xE4, 256])
    assert texts == ["a", "�", "b", "�", "<eod>"]
    assert token_texts(NullTokenizer(60), [5, 60]) == ["5", "␣60"]


def test_nothing_invisible_is_left():
    text = "".join(map(chr, (*range(0x300), 0x200B, 0x202E, 0x2028, 0x2029, 0xFEFF, 0xE000)))
    shown = visible(text)
    hidden = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"}
    assert not [one for one in shown if unicodedata.category(one) in hidden]
    assert "\\x07" in shown
    assert "\\u2028" in shown
    assert visible("\ud800\U000e0001") == "\\ud800\\U000e0001"


def test_long_ones_are_cut():
    assert shortened("a" * 12) == "a" * 12
    assert shortened("a" * 13) == "a" * 11 + "…"
