"""Generated text for people and for programs. No torch."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from megatron_attnres.evaluation.generation.prompts import EncodedPrompt
from megatron_attnres.evaluation.generation.settings import (
    Continuation,
    Generation,
    GenerationSettings,
    Pace,
)


def as_object(
    prompts: Sequence[EncodedPrompt], generation: Generation, settings: GenerationSettings
) -> dict[str, Any]:
    """What ``--json`` prints of it."""
    return {
        "settings": asdict(settings),
        "prompts": [
            {
                "prompt": encoded.prompt.text,
                "prompt_ids": encoded.ids,
                "texts": [
                    {"text": one.text, "ids": one.ids, "ended_by": one.ended_by}
                    for one in generation.continuations
                    if one.prompt == index
                ],
            }
            for index, encoded in enumerate(prompts)
        ],
        "prefill": _pace_object(generation.prefill),
        "decode": _pace_object(generation.decode),
    }


def text_lines(prompts: Sequence[EncodedPrompt], generation: Generation) -> Iterator[str]:
    """Prompts with their texts; under a line that says which it is, where there are several."""
    several = len(generation.continuations) > 1
    for one in generation.continuations:
        if several:
            yield f"--- prompt {one.prompt + 1}, text {one.sample + 1}: {one.ended_by}"
        yield prompts[one.prompt].prompt.text + one.text


def sample_lines(generation: Generation) -> Iterator[str]:
    """Texts of one prompt, without it; under a line that says which it is."""
    for one in generation.continuations:
        yield f"--- text {one.sample + 1}: {one.ended_by}"
        yield one.text


def pace_line(generation: Generation) -> str:
    """How much came out, why no more, and how fast."""
    continuations = generation.continuations
    new = sum(len(one.ids) for one in continuations)
    return (
        f"{new:,} tokens ({_reasons(continuations)}); prefill {_pace_text(generation.prefill)}, "
        f"decode {_pace_text(generation.decode)}"
    )


def _reasons(continuations: Sequence[Continuation]) -> str:
    counts = Counter(one.ended_by for one in continuations)
    if len(continuations) == 1:
        return continuations[0].ended_by
    return ", ".join(f"{reason}: {count}" for reason, count in counts.most_common())


def _pace_text(pace: Pace) -> str:
    rate = pace.tokens_per_second
    if rate is None:
        return "none"
    return f"{pace.tokens:,} in {pace.seconds:.2f} s, {rate:,.1f} tokens/s"


def _pace_object(pace: Pace) -> dict[str, Any]:
    return asdict(pace) | {"tokens_per_second": pace.tokens_per_second}
