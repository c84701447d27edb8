"""How text is generated, and what comes out. Plain data, no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_attnres.errors import InputError

EndedBy = Literal["end of text", "stop text", "length", "interrupted"]


@dataclass(frozen=True)
class SamplingSettings:
    """How the next token is chosen from the model's logits.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token (greedy).
        top_k: draw among so many likeliest tokens only; None sets no such limit.
        top_p: draw among the likeliest tokens whose probabilities together reach this; None sets no
            such limit.
        seed: of the random numbers, beside a sequence's own place.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0


@dataclass(frozen=True)
class GenerationSettings:
    """How prompts are continued.

    Attributes:
        max_new_tokens: after which a text ends in any case.
        sampling: how tokens are chosen.
        num_samples: texts for each prompt.
        batch_size: sequences that are computed together, at most.
        stops: texts, none of them empty; a generated text ends before the first one that turns up.
        ignore_end: go on after an end of document.
    """

    max_new_tokens: int
    sampling: SamplingSettings = SamplingSettings()
    num_samples: int = 1
    batch_size: int = 8
    stops: Sequence[str] = ()
    ignore_end: bool = False


@dataclass(frozen=True)
class Continuation:
    """One generated text.

    Attributes:
        prompt: index of the prompt.
        sample: index among the texts of that prompt.
        ids: every generated token, with the end of document or the stop text that ended it.
        text: without them.
        ended_by: why it goes no further.
    """

    prompt: int
    sample: int
    ids: tuple[int, ...]
    text: str
    ended_by: EndedBy


@dataclass(frozen=True)
class Pace:
    """Tokens in a time.

    Attributes:
        tokens: of all ranks.
        seconds: of the slowest one.
    """

    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        """None where there were no tokens."""
        return self.tokens / self.seconds if self.tokens else None


@dataclass(frozen=True)
class Generation:
    """What came out.

    Attributes:
        continuations: by prompt and sample, in order.
        prefill: prompt tokens that the model took at once, up to each sequence's first new token.
        decode: tokens generated after a sequence's first one. The time is that of all single-token
            steps, also of those in which longer prompts of a batch were used up.
    """

    continuations: tuple[Continuation, ...]
    prefill: Pace
    decode: Pace


def check_sampling(sampling: SamplingSettings) -> None:
    """Refuse values without a meaning.

    Raises:
        InputError: names the flag.
    """
    temperature, top_k, top_p = sampling.temperature, sampling.top_k, sampling.top_p
    if not (0 <= temperature < math.inf):
        raise InputError(
            f"--temperature {temperature}: must be a number of at least 0; 0 takes the likeliest "
            "token"
        )
    if top_k is not None and top_k < 1:
        raise InputError(f"--top-k {top_k}: must be a whole number of at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise InputError(f"--top-p {top_p}: must be above 0 and at most 1")


def check_generation(settings: GenerationSettings) -> None:
    """Refuse values without a meaning.

    Raises:
        InputError: names the flag.
    """
    check_sampling(settings.sampling)
    for name in ("max_new_tokens", "num_samples", "batch_size"):
        value = getattr(settings, name)
        if value < 1:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} {value}: must be a whole number of at least 1")
    if "" in settings.stops:
        raise InputError("--stop '': every text holds it; give a text of at least one character")
