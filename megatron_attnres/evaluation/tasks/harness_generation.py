"""The harness' requests for text, as requests to a Generator. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_attnres.data.tokenizers import Tokenizer
from megatron_attnres.errors import InputError
from megatron_attnres.evaluation.generation.settings import GenerationSettings, SamplingSettings

# By the harness' order of precedence.
_MOST_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_DEFAULT_MOST_TOKENS = 256
_KNOWN = {"until", "do_sample", "temperature", "top_k", "top_p", *_MOST_TOKENS}
# Prompts that are asked for at once, in batches.
_BATCHES_AT_ONCE = 8


@dataclass(frozen=True)
class TextRequest:
    """Prompts to be continued, for all ranks.

    Attributes:
        prompts: ids of each.
        settings: how.
        first_prompt: index that the first one goes by.
    """

    prompts: tuple[tuple[int, ...], ...]
    settings: GenerationSettings
    first_prompt: int


def text_requests(
    contexts: Sequence[str], settings: GenerationSettings, tokenizer: Tokenizer, context: int
) -> Iterator[TextRequest]:
    """Requests for texts in the order of their contexts.

    A context that leaves no room for the new tokens loses tokens on the left; an empty one becomes
    an end of document.

    Args:
        contexts: texts to be continued.
        settings: how.
        tokenizer: of the model.
        context: most tokens that the model sees at once.
    """
    # The last new token is not read.
    room = context + 1 - settings.max_new_tokens
    prompts = [tuple(tokenizer.tokenize(text)[-room:]) or (tokenizer.eod,) for text in contexts]
    step = _BATCHES_AT_ONCE * settings.batch_size
    for first in range(0, len(prompts), step):
        yield TextRequest(tuple(prompts[first : first + step]), settings, first)


def settings_of(options: dict[str, Any], context: int, batch_size: int) -> GenerationSettings:
    """What the harness' generation settings mean here.

    Args:
        options: of a task.
        context: most tokens that the model sees at once.
        batch_size: sequences that are computed together.

    Raises:
        InputError: an option that the generator does not have, a value that it cannot have, or no
            room for a context.
    """
    for name, value in options.items():
        # A single beam is no beam search.
        if name not in _KNOWN and (name, value) != ("num_beams", 1):
            raise InputError(
                f"asks for generated text with {name} {value}; allowed are "
                f"{', '.join(sorted(_KNOWN))}"
            )
    _check_types(options)
    most = next((options[name] for name in _MOST_TOKENS if name in options), _DEFAULT_MOST_TOKENS)
    if most >= context:
        raise InputError(
            f"generates up to {most} tokens, which do not fit the model's context of {context} "
            "with a question before them; give a task that generates fewer"
        )
    until = options.get("until") or []
    until = [until] if isinstance(until, str) else until
    return GenerationSettings(
        int(most),
        _sampling_of(options),
        batch_size=batch_size,
        stops=tuple(stop for stop in until if stop),
    )


def _check_types(options: dict[str, Any]) -> None:
    """Refuse what a task's YAML may say but no number or text is."""
    for name, value in options.items():
        if name == "until":
            stops = value if isinstance(value, list) else [value]
            fits, needed = all(isinstance(one, str | None) for one in stops), "text or texts"
        elif name in _MOST_TOKENS:
            fits, needed = _is_number(value, int) and value > 0, "a whole number above 0"
        elif name == "do_sample":
            fits, needed = isinstance(value, bool | None), "true or false"
        elif name == "top_k":
            fits, needed = value is None or _is_number(value, int), "a whole number"
        else:
            fits, needed = value is None or _is_number(value, int | float), "a number"
        if not fits:
            raise InputError(f"asks for generated text with {name} {value!r}; {needed} is needed")


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _sampling_of(options: dict[str, Any]) -> SamplingSettings:
    """Greedy unless the task says otherwise, in one of the two ways that the harness knows."""
    do_sample = options.get("do_sample")
    temperature = options.get("temperature")
    if temperature is None:
        temperature = 1.0 if do_sample else 0.0
    if do_sample is False or temperature == 0:
        return SamplingSettings()
    return SamplingSettings(float(temperature), options.get("top_k"), options.get("top_p"))
