"""Generated text while its tokens come: only what no later token changes. No torch.

A token may hold a part of a character, or the beginning of a text at which to stop; what could
still turn into something else is held back.
"""

from collections.abc import Callable, Sequence

# What decoders write for bytes that are no character. A character's unfinished beginning is at most
# three bytes, and decoders write one mark for each or for all.
_MARK = "\N{REPLACEMENT CHARACTER}"
_UNFINISHED_MARKS = 3

Detokenize = Callable[[Sequence[int]], str]


class GrowingText:
    """The text of ids that come one by one.

    All pieces together are what the ids add to the text of the prompt: ``detokenize(prompt + ids)``
    without ``detokenize(prompt)`` before it. Some Hugging Face decoders (ByteFallback) take whole
    characters back where a byte that fits nothing follows them; here those stay.

    Args:
        detokenize: the text of ids.
        prompt: ids of whole characters, before those that come.
    """

    def __init__(self, detokenize: Detokenize, prompt: Sequence[int] = ()) -> None:
        self._detokenize = detokenize
        # Only the last ids are decoded: some whose text is out, and new ones behind them. The known
        # ones keep decoders from treating the new ones as the beginning of a text, where some of
        # them drop a space.
        self._known = list(prompt)
        self._known_text = detokenize(self._known)
        self._new: list[int] = []
        self._given = ""

    def add(self, id_: int) -> str:
        """The piece of text that is final now; often empty."""
        self._new.append(id_)
        text = self._text_of_new()
        final = _without_unfinished(text)
        piece = final[len(self._given) :]
        self._given += piece
        if final == text:
            self._move_on()
        return piece

    def rest(self) -> str:
        """What was held back; no more ids come."""
        return self._text_of_new(are_last=True)[len(self._given) :]

    def _text_of_new(self, are_last: bool = False) -> str:
        text = self._detokenize([*self._known, *self._new])
        if text.startswith(self._known_text + self._given):
            return text[len(self._known_text) :]
        if text.endswith(_MARK) and not are_last:
            # What is known reads otherwise beside a character's first bytes. The rest of them may
            # put that right.
            return self._given + _MARK
        return self._detokenize(self._new)

    def _move_on(self) -> None:
        """Let the new ids be known, unless they leave nothing that a text could begin with."""
        text = self._detokenize(self._new)
        if text:
            self._known, self._known_text = self._new, text
            self._new, self._given = [], ""


class TextUntil:
    """A text that ends before the first of some others.

    Attributes:
        ended: whether one of them turned up.

    Args:
        stops: the others, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.ended = False

    def add(self, piece: str) -> str:
        """What of the text up to here comes before every stop, and is no beginning of one."""
        if self.ended:
            return ""
        text = self._held + piece
        starts = [text.find(stop) for stop in self._stops]
        found = [start for start in starts if start >= 0]
        self.ended = bool(found)
        cut = min(found) if found else len(text) - self._beginning_of_a_stop(text)
        self._held = text[cut:]
        return text[:cut]

    def rest(self) -> str:
        """What was held back as the possible beginning of a stop; no more text comes."""
        return "" if self.ended else self._held

    def _beginning_of_a_stop(self, text: str) -> int:
        """Length of the longest end of the text that a stop may begin with."""
        return max((_overlap(text, stop) for stop in self._stops), default=0)


class TextStream:
    """The text of ids that come one by one, up to a stop.

    Args:
        detokenize: the text of ids.
        prompt: ids before those that come.
        stops: texts, none of them empty, before the first of which the text ends.
    """

    def __init__(
        self, detokenize: Detokenize, prompt: Sequence[int] = (), stops: Sequence[str] = ()
    ) -> None:
        self._growing = GrowingText(detokenize, prompt)
        self._until = TextUntil(stops)

    @property
    def stopped(self) -> bool:
        """Whether the text is at a stop."""
        return self._until.ended

    def add(self, id_: int) -> str:
        """The piece of text that is final now; often empty."""
        return self._until.add(self._growing.add(id_))

    def rest(self) -> str:
        """What was held back; no more ids come."""
        return self._until.add(self._growing.rest()) + self._until.rest()


def _without_unfinished(text: str) -> str:
    """The text without marks at its end that later bytes could make a character of."""
    kept = len(text.rstrip(_MARK))
    return text[: max(kept, len(text) - _UNFINISHED_MARKS)]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of ``stop`` that ``text`` ends with."""
    longest = min(len(text), len(stop) - 1)
    return next(length for length in range(longest, -1, -1) if text.endswith(stop[:length]))
