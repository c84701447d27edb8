"""Tokens as people can read them: every character visible, none that does anything. No torch."""

import unicodedata
from collections.abc import Sequence

from megatron_attnres.data.tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MOST_BYTES = 4  # of a character in UTF-8, each of which may be a token
_SIGNS = {
    " ": "\N{OPEN BOX}",
    "\n": "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}",
    "\t": "\N{RIGHTWARDS ARROW TO BAR}",
}
_CONTINUED = "\N{HORIZONTAL ELLIPSIS}"
# Control, format (joiners, directions), surrogates, private, unassigned, separators.
_UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"}


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of every token, with signs for blanks and escapes for what cannot be seen.

    A character whose bytes are several tokens stands with the first of them, the others are an
    ellipsis. Tokens without text are ``<eod>`` or ``<id N>``.
    """
    texts: list[str] = []
    while len(texts) < len(ids):
        start = len(texts)
        count, text = _next_text(tokenizer, ids, start)
        texts.append(visible(text) or _name(ids[start], tokenizer))
        texts += [_CONTINUED] * (count - 1)
    return texts


def visible(text: str) -> str:
    """``text`` with signs for blanks, tabs and line ends, escapes for what else cannot be seen."""
    return "".join(_visible(character) for character in text)


def shortened(text: str, most: int = 12) -> str:
    """For an axis: at most so many characters."""
    return text if len(text) <= most else text[: most - 1] + _CONTINUED


def escape(character: str) -> str:
    """As Python writes it in ASCII: ``\\x07``, ``\\u2028``."""
    code = ord(character)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def _name(id_: int, tokenizer: Tokenizer) -> str:
    return "<eod>" if id_ == tokenizer.eod else f"<id {id_}>"


def _visible(character: str) -> str:
    if character in _SIGNS:
        return _SIGNS[character]
    if unicodedata.category(character) in _UNSEEN:
        return escape(character)
    return character


def _next_text(tokenizer: Tokenizer, ids: Sequence[int], start: int) -> tuple[int, str]:
    """How many tokens the next piece of whole characters takes, and its text.

    Decoded behind the token before it: alone, some tokenizers drop its leading blank.
    """
    before = list(ids[max(0, start - 1) : start])
    known = len(tokenizer.detokenize(before)) if before else 0
    first = ""
    for count in range(1, min(_MOST_BYTES, len(ids) - start) + 1):
        text = tokenizer.detokenize([*before, *ids[start : start + count]])[known:]
        if count == 1:
            first = text
        if not text.endswith(_REPLACEMENT):
            return (count, text) if _REPLACEMENT not in text else (1, first)
    return 1, first
