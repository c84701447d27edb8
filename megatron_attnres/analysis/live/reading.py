"""Trained models that read a text whenever they are asked, whichever thread asks."""

from dataclasses import dataclass
from functools import lru_cache
from threading import Lock

from megatron_attnres.analysis.depth.layout import DepthLayout, layout_of
from megatron_attnres.analysis.depth.measure import measure, weights_of_tokens
from megatron_attnres.analysis.depth.records import Magnitudes, TokenWeights
from megatron_attnres.analysis.depth.token_texts import token_texts
from megatron_attnres.analysis.depth.windows import windows_of
from megatron_attnres.data.tokenizers import Tokenizer
from megatron_attnres.model.gpt import GPTChunk
from megatron_attnres.training.checkpoints.stored_model import StoredModel

# More text than this never makes fewer tokens than the context: the rest need not be cut into
# tokens, however much somebody pastes.
_MOST_CHARACTERS_PER_TOKEN = 64
_READINGS_KEPT = 8


@dataclass(frozen=True)
class Reading:
    """What a model made of a text.

    Attributes:
        texts: of the tokens that it read, at least one, as ``token_texts`` makes them.
        cut: whether the text is longer than the model's context, so that only its end was read.
        weights: of each of these tokens; None for a baseline.
        magnitudes: over these tokens.
    """

    texts: list[str]
    cut: bool
    weights: TokenWeights | None
    magnitudes: Magnitudes


class LiveModel:
    """One trained model.

    Attributes:
        stored: the checkpoint.
        layout: of its sources and readers.

    Args:
        stored: the checkpoint.
        tokenizer: of its ids.
        module: the whole model with its weights.
        turn: held while a model computes; the same for all models of the process, because neither
            a model nor torch.distributed may be used by two threads at once.
    """

    def __init__(
        self, stored: StoredModel, tokenizer: Tokenizer, module: GPTChunk, turn: Lock
    ) -> None:
        self.stored = stored
        self.layout: DepthLayout = layout_of(stored.model)
        self._tokenizer = tokenizer
        self._module = module
        self._turn = turn
        # The same text is asked for again with every move of a slider.
        self._kept = lru_cache(_READINGS_KEPT)(self._read)

    @property
    def context(self) -> int:
        """Most tokens that it reads."""
        return self.stored.model.seq_length

    def read(self, text: str) -> Reading | None:
        """Read the last tokens of a text; None if it has none.

        Raises:
            InputError: the tokenizer refuses the text.
        """
        with self._turn:
            return self._kept(text)

    def _read(self, text: str) -> Reading | None:
        most = self.context * _MOST_CHARACTERS_PER_TOKEN
        # A browser may send half a surrogate pair, which no tokenizer takes.
        whole = text[-most:].encode("utf-8", "replace").decode("utf-8")
        ids = self._tokenizer.tokenize(whole)
        if not ids:
            return None
        last = ids[-self.context :]
        weights = (
            weights_of_tokens(self._module, self.layout, last) if self.layout.readers else None
        )
        windows = windows_of(last, self.context)
        magnitudes = measure(self._module, self.layout, windows, 1, with_weights=False).magnitudes
        cut = len(text) > most or len(ids) > self.context
        return Reading(token_texts(self._tokenizer, last), cut, weights, magnitudes)
