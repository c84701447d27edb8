"""What a batch of growing texts goes on with, decided on one rank of a tensor-parallel group."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_attnres.data.tokenizers import Tokenizer
from megatron_attnres.evaluation.generation.sampling import Sampler
from megatron_attnres.evaluation.generation.settings import (
    Continuation,
    EndedBy,
    GenerationSettings,
)
from megatron_attnres.evaluation.generation.streaming import TextStream

# Told of every new piece of text: index of the prompt, of the sample, the piece.
Listener = Callable[[int, int, str], None]
# Asked after every token whether to end all texts where they are.
Interrupted = Callable[[], bool]


@dataclass(frozen=True)
class Beginning:
    """A prompt to be continued once.

    Attributes:
        prompt: its index.
        sample: index among the texts of that prompt.
        ids: of the prompt, at least one.
    """

    prompt: int
    sample: int
    ids: tuple[int, ...]


class Chooser:
    """Chooses the tokens of a batch and reads their text.

    Args:
        beginnings: of the batch.
        settings: how texts are generated.
        tokenizer: of the model.
        device: of the logits.
        listen: see above.
        interrupted: see above.
    """

    def __init__(
        self,
        beginnings: Sequence[Beginning],
        settings: GenerationSettings,
        tokenizer: Tokenizer,
        device: torch.device,
        listen: Listener | None,
        interrupted: Interrupted | None,
    ) -> None:
        self._texts = [_Text(one, settings, tokenizer, listen) for one in beginnings]
        self._sampler = Sampler(
            settings.sampling,
            tokenizer.vocab_size,
            [(one.prompt, one.sample) for one in beginnings],
            device,
        )
        self._interrupted = interrupted
        # What sequences go on with whose text has ended; nobody reads it.
        self._filler = tokenizer.eod

    @property
    def continuations(self) -> list[Continuation]:
        """Of the whole batch, once all have ended."""
        return [text.continuation() for text in self._texts]

    def next_tokens(self, logits: Tensor, length: int) -> list[int] | None:
        """What every sequence goes on with, or None where all texts have ended.

        Args:
            logits: [b, vocabulary], of what follows the first ``length`` tokens.
            length: that every sequence has.

        Raises:
            InputError: logits are not finite.
        """
        tokens = [text.prompt_token(length) for text in self._texts]
        waiting = [
            index
            for index, (token, text) in enumerate(zip(tokens, self._texts, strict=True))
            if token is None and text.ended_by is None
        ]
        chosen = self._sampler.choose(logits, waiting) if waiting else []
        for index, token in zip(waiting, chosen, strict=True):
            self._texts[index].add(token)
            tokens[index] = token
        if self._interrupted is not None and self._interrupted():
            for text in self._texts:
                text.end("interrupted")
        if all(text.ended_by for text in self._texts):
            return None
        return [self._filler if token is None else token for token in tokens]


class _Text:
    """One sequence's generated tokens, and their text as it grows."""

    def __init__(
        self,
        beginning: Beginning,
        settings: GenerationSettings,
        tokenizer: Tokenizer,
        listen: Listener | None,
    ) -> None:
        self._beginning = beginning
        self._stream = TextStream(tokenizer.detokenize, beginning.ids, settings.stops)
        self._listen = listen
        self._end_id = None if settings.ignore_end else tokenizer.eod
        self._most = settings.max_new_tokens
        self._ids: list[int] = []
        self._pieces: list[str] = []
        self.ended_by: EndedBy | None = None

    def prompt_token(self, position: int) -> int | None:
        """The prompt's token at a position; None behind the prompt."""
        ids = self._beginning.ids
        return ids[position] if position < len(ids) else None

    def add(self, token: int) -> None:
        """Take a new token."""
        self._ids.append(token)
        if token == self._end_id:
            self.end("end of text")
            return
        self._say(self._stream.add(token))
        if self._stream.stopped:
            self.end("stop text")
        elif len(self._ids) == self._most:
            self.end("length")

    def end(self, reason: EndedBy) -> None:
        """Let it go no further, if it has not ended."""
        if self.ended_by is not None:
            return
        self._say(self._stream.rest())
        self.ended_by = "stop text" if self._stream.stopped else reason

    def continuation(self) -> Continuation:
        """What came out."""
        assert self.ended_by is not None, "asked for the result of a text that still grows"
        return Continuation(
            self._beginning.prompt,
            self._beginning.sample,
            tuple(self._ids),
            "".join(self._pieces),
            self.ended_by,
        )

    def _say(self, piece: str) -> None:
        if not piece:
            return
        self._pieces.append(piece)
        if self._listen is not None:
            self._listen(self._beginning.prompt, self._beginning.sample, piece)
