"""A SentencePiece model of ours as a fast tokenizer of Hugging Face's, with the same ids. No torch.

Both libraries merge the pair of neighbours that makes the best piece, the leftmost of equals, until
no two neighbours make one. What differs is how they say so:

- SentencePiece merges any two neighbours that spell a piece, in the order of the pieces' scores.
  Here every way to cut a piece into two that can stand side by side is a merge of its own.
- SentencePiece writes a space as U+2581 inside, and ours keeps that character of a text apart as
  bytes. Here pieces hold spaces themselves, so that U+2581 is a character like any other that is
  not in the vocabulary: bytes, which never merge.
- Pieces defined by the user are cut out of a text first, the longest at the leftmost place, which
  is what happens to added tokens here.
- Control pieces such as ``</s>`` never come from a text: ``split_special_tokens`` in the
  tokenizer's configuration.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_attnres.errors import InputError

_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"
# Kinds of pieces and of models, as SentencePiece numbers them.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_BPE = 2
_NUM_BYTES = 256


class SentencePieceModel:
    """A model file's pieces, with spaces as spaces.

    Attributes:
        pieces: by id.

    Args:
        path: of the model file.

    Raises:
        InputError: it has what a fast tokenizer cannot do exactly; says what.
    """

    def __init__(self, path: Path) -> None:
        from sentencepiece import sentencepiece_model_pb2

        proto = sentencepiece_model_pb2.ModelProto()
        proto.ParseFromString(path.read_bytes())
        reason = _what_is_not_exact(proto)
        if reason is not None:
            raise InputError(f"--tokenizer-model {path}: {reason}")
        self._kinds = [piece.type for piece in proto.pieces]
        self._scores = [piece.score for piece in proto.pieces]
        self.pieces = [piece.piece.replace(_SPACE_MARK, " ") for piece in proto.pieces]

    @property
    def unknown(self) -> str:
        """The piece for what cannot be spelled; bytes spell everything."""
        return self.of_kind(_UNKNOWN)[0]

    @property
    def user_defined(self) -> list[str]:
        """Pieces that are cut out of a text first."""
        return self.of_kind(_USER_DEFINED)

    @property
    def special(self) -> list[str]:
        """Pieces that never come from a text, bytes excluded."""
        return [*self.of_kind(_UNKNOWN), *self.of_kind(_CONTROL)]

    def of_kind(self, kind: int) -> list[str]:
        """The pieces of one kind, by id."""
        return [one for one, its in zip(self.pieces, self._kinds, strict=True) if its == kind]

    def merges(self) -> list[tuple[str, str]]:
        """All pairs that make a piece, in the order in which they are made."""
        normal = sorted(
            (-score, piece)
            for piece, score, kind in zip(self.pieces, self._scores, self._kinds, strict=True)
            if kind == _NORMAL and len(piece) > 1
        )
        known = set(self.of_kind(_NORMAL))
        return [pair for _, piece in normal for pair in _cuts(piece, known)]

    def overlaps(self) -> Iterator[str]:
        """Texts in which a piece can be made at two places that share characters.

        There the two libraries might take turns differently: which place is left of the other
        decides in one, and how the piece is cut decides in the other.
        """
        for piece in self.of_kind(_NORMAL):
            for shift in range(1, len(piece)):
                if piece.startswith(piece[shift:]):
                    yield piece[:shift] + piece
                    yield piece[:shift] * 2 + piece


def write_fast_tokenizer(model: SentencePieceModel, folder: Path, eos: str, max_length: int) -> int:
    """Write tokenizer.json and its configuration, which add no ids of their own to a text.

    Args:
        model: of SentencePiece.
        folder: takes them.
        eos: the piece that ends a document.
        max_length: tokens that the model can read.

    Returns:
        The id that fills up short rows of a batch.
    """
    from tokenizers import AddedToken, Tokenizer, decoders
    from tokenizers.models import BPE

    vocabulary = {piece: id_ for id_, piece in enumerate(model.pieces)}
    tokenizer = Tokenizer(
        BPE(vocabulary, model.merges(), unk_token=model.unknown, byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in model.special])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in model.user_defined])
    tokenizer.save(str(folder / "tokenizer.json"))
    configuration = {
        # The name that all releases know.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos,
        "unk_token": model.unknown,
        # Never in a text; the end of a document, as a filler, would be left out of losses.
        "pad_token": model.unknown,
        "padding_side": "left",
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(configuration, indent=2) + "\n", encoding="utf-8"
    )
    return vocabulary[model.unknown]


def _cuts(piece: str, known: set[str]) -> Iterator[tuple[str, str]]:
    """The two halves that can stand side by side, longest left half first."""
    for place in range(len(piece) - 1, 0, -1):
        left, right = piece[:place], piece[place:]
        if left in known and right in known:
            yield left, right


def _what_is_not_exact(proto: Any) -> str | None:
    """Why the model has no fast tokenizer with the same ids on every text; None if it has."""
    normalizer, kinds = proto.normalizer_spec, [piece.type for piece in proto.pieces]
    normal = [piece for piece in proto.pieces if piece.type == _NORMAL]
    if proto.trainer_spec.model_type != _BPE:
        return (
            "is no BPE model; a fast tokenizer adds up a unigram's scores in another precision and "
            "cuts some texts into other tokens; give --without-tokenizer"
        )
    for what, found in (
        ("normalises text", bool(normalizer.precompiled_charsmap)),
        ("puts a space before a text", normalizer.add_dummy_prefix),
        ("removes spaces", normalizer.remove_extra_whitespaces),
        ("leaves spaces as they are", not normalizer.escape_whitespaces),
        ("lacks pieces for bytes", kinds.count(_BYTE) != _NUM_BYTES),
        ("has unused pieces", _UNUSED in kinds),
        ("has pieces of equal score", len({one.score for one in normal}) != len(normal)),
        ("has pieces of characters that are no pieces", not _spells(normal)),
    ):
        if found:
            return (
                f"{what}, which models of tools/train_tokenizer.py do not; a fast tokenizer would "
                "make other ids; give --without-tokenizer"
            )
    return None


def _spells(normal: Sequence[Any]) -> bool:
    """Whether every character of the pieces is a piece."""
    characters = {one.piece for one in normal if len(one.piece) == 1}
    return all(set(one.piece) <= characters for one in normal)
