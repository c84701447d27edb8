"""The flags of pretrain_attnres.py that a grid gives, and those that are not its to give."""

from collections.abc import Mapping
from typing import Any

from megatron_attnres.errors import InputError
from megatron_attnres.training.arguments import parse_arguments
from megatron_attnres.training.sweeps.planning.grid_values import mapping

FLAGS_WITH_LISTS = ("data-path", "pipeline-layers-per-chunk")
LARGEST_WHOLE_NUMBER = 10**18
OF_THE_LAUNCHER = "leave it to launch_sweep.py run, which gives it to every run"
# What to do instead of giving them as flags.
DECIDED_ELSEWHERE = {
    "config": "write its keys here",
    "train-iters": "give tokens, tokens-per-parameter or compute, beside flags or in a size",
    "lr": "give learning-rates, beside flags or in a size",
    "seed": "give seeds, beside flags or in a size",
    "attn-res-mode": "give modes, beside flags or in a size",
    "attn-res-num-blocks": "give num-blocks, beside flags or in a size",
    "attn-res-block-size": "give num-blocks, beside flags or in a size",
} | dict.fromkeys(
    (
        "run-dir",
        "save",
        "load",
        "load-weights-only",
        "save-on-signal",
        "keep-last",
        "keep-every",
        "exit-status-when-stopped",
        "metrics-file",
        "summary-file",
        "tensorboard-dir",
    ),
    OF_THE_LAUNCHER,
)


def read_flags(value: Any, place: str) -> dict[str, Any]:
    """Flags by name without the dashes; those without a value (null) are left out.

    Raises:
        InputError: no mapping, an unknown flag, one that is decided elsewhere, one given in two
            spellings, or a value that no flag takes.
    """
    known = {name.replace("_", "-") for name in vars(parse_arguments([]))}
    flags: dict[str, Any] = {}
    for key, given in mapping(value, place).items():
        name = key.replace("_", "-")
        if name in DECIDED_ELSEWHERE:
            raise InputError(f"{place}: {key} cannot be given here; {DECIDED_ELSEWHERE[name]}")
        if name not in known:
            raise InputError(
                f"{place}: unknown key {key!r}; give flags of pretrain_attnres.py, see its --help"
            )
        if name in flags:
            raise InputError(f"{place}: {name} is given twice; give it once")
        if isinstance(given, list) and name not in FLAGS_WITH_LISTS:
            raise InputError(f"{place}.{key}: {given!r} is not allowed; give a single value")
        _check_value(given, f"{place}.{key}")
        flags[name] = given
    return {name: given for name, given in flags.items() if given is not None}


def as_words(flags: Mapping[str, Any]) -> list[str]:
    """The flags as a command line, where pretrain_attnres.py checks their values."""
    words = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        else:
            # One word, so that a negative number is not taken for a flag.
            words.append(f"--{name}={value}")
    return words


def _check_value(value: Any, place: str) -> None:
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, int) and abs(one) > LARGEST_WHOLE_NUMBER:
            raise InputError(f"{place}: is above {LARGEST_WHOLE_NUMBER:g}; give a smaller number")
        is_plain = one is None or isinstance(one, str | int | float)
        if not is_plain or "\0" in str(one):
            raise InputError(f"{place}: {one!r} is not allowed; give a number, text, true or false")
