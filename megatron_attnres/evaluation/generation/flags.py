"""Flags of generated text, and what they mean. No torch."""

import argparse

from megatron_attnres.commands import whole_number
from megatron_attnres.errors import InputError
from megatron_attnres.evaluation.generation.prompts import DEFAULT_NEW_TOKENS
from megatron_attnres.evaluation.generation.settings import (
    GenerationSettings,
    SamplingSettings,
    check_generation,
)


def add_generation_flags(parser: argparse.ArgumentParser) -> None:
    """How far prompts are continued, and how tokens are chosen."""
    add = parser.add_argument_group("text").add_argument
    add(
        "--max-new-tokens",
        type=whole_number(1),
        metavar="N",
        help=f"not given: {DEFAULT_NEW_TOKENS}, or what fits the model's context",
    )
    add("--ignore-eos", action="store_true", help="go on after an end of document")
    add(
        "--stop",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="end before the first of these; a line end is $'\\n' in a shell",
    )
    add(
        "--temperature",
        type=float,
        metavar="T",
        help="divides the logits; 0 takes the likeliest token; not given: 0, or 1 beside --top-k "
        "or --top-p",
    )
    add("--top-k", type=int, metavar="K", help="draw among the K likeliest tokens")
    add(
        "--top-p",
        type=float,
        metavar="P",
        help="draw among the likeliest tokens whose probabilities reach P together",
    )
    add("--seed", type=whole_number(0), default=0, metavar="N", help="of what is drawn")
    add("--num-samples", type=whole_number(1), default=1, metavar="N", help="texts per prompt")
    add(
        "--batch-size",
        type=whole_number(1),
        default=8,
        metavar="N",
        help="texts that are computed together",
    )


def generation_of(arguments: argparse.Namespace) -> GenerationSettings:
    """What the flags say; how many tokens fit, only prompts can say.

    Raises:
        InputError: a value without a meaning, or two that do not go together.
    """
    top_k, top_p, temperature = arguments.top_k, arguments.top_p, arguments.temperature
    narrows = top_k is not None or top_p is not None
    if temperature is None:
        temperature = 1.0 if narrows else 0.0
    settings = GenerationSettings(
        arguments.max_new_tokens or DEFAULT_NEW_TOKENS,
        SamplingSettings(temperature, top_k, top_p, arguments.seed),
        arguments.num_samples,
        arguments.batch_size,
        tuple(arguments.stop),
        arguments.ignore_eos,
    )
    check_generation(settings)
    if temperature == 0 and narrows:
        flag = f"--top-k {top_k}" if top_k is not None else f"--top-p {top_p}"
        raise InputError(f"{flag}: has no effect beside --temperature 0; leave one of them out")
    if temperature == 0 and arguments.num_samples > 1:
        raise InputError(
            f"--num-samples {arguments.num_samples}: the likeliest text is always the same; give "
            "--temperature above 0"
        )
    return settings
