"""From a grid to its runs, each checked as pretrain_attnres.py checks its flags. No torch."""

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from megatron_attnres.data.configuration import TokenizerConfig
from megatron_attnres.data.tokenizers import load_tokenizer
from megatron_attnres.errors import InputError
from megatron_attnres.model.flops import training_flops
from megatron_attnres.model.parameter_count import parameter_count
from megatron_attnres.training.configuration import (
    checked_arguments,
    configuration_of,
    tokenizer_config_of,
)
from megatron_attnres.training.run_config import RunConfig
from megatron_attnres.training.sweeps.planned_run import PlannedRun
from megatron_attnres.training.sweeps.planning.budgets import Budget, iterations_of
from megatron_attnres.training.sweeps.planning.curves import Curve
from megatron_attnres.training.sweeps.planning.grid import Size, read_grid
from megatron_attnres.training.sweeps.planning.names import run_name
from megatron_attnres.training.sweeps.planning.run_flags import as_words

# More than any run has; stands for them in the checks of a size, before they are known.
MANY_ITERATIONS = 10**12


def plan_runs(path: Path, vocab_size: int | None = None) -> list[PlannedRun]:
    """The runs of a grid, in its order: size, curve, budget, learning rate, seed.

    Args:
        path: of the YAML file, see grid.py.
        vocab_size: ids of the tokenizer, before they are padded; None asks the tokenizer that the
            flags name.

    Raises:
        InputError: one line that names the file, the size or run, the flag and the way out.
    """
    vocabulary = _Vocabulary(vocab_size)
    runs = [run for size in read_grid(path) for run in _runs_of(size, path, vocabulary)]
    _check_names(path, runs)
    return runs


class _Vocabulary:
    """How many ids a tokenizer has; each is loaded once."""

    def __init__(self, given: int | None) -> None:
        self._given = given
        self._found: dict[TokenizerConfig, int] = {}

    def size_of(self, config: TokenizerConfig) -> int:
        if self._given is not None:
            return self._given
        if config not in self._found:
            try:
                self._found[config] = load_tokenizer(config).vocab_size
            except InputError as error:
                raise InputError(f"{error}; or plan with --vocab-size N") from None
        return self._found[config]


def _runs_of(size: Size, path: Path, vocabulary: _Vocabulary) -> Iterator[PlannedRun]:
    # Full mode takes every flag about depth attention, and has no blocks to cut.
    probe = {"attn-res-mode": "full", "train-iters": MANY_ITERATIONS, "lr": 1.0}
    checked = _checked({**size.flags, **probe}, size.place, vocabulary)
    model, batch = checked.model, checked.loop.global_batch_size
    for curve, budget, learning_rate, seed in product(
        size.curves, size.budgets, size.learning_rates, size.seeds
    ):
        cost = replace(model, attn_res=curve.attn_res(model.num_sublayers))
        name = _name(size, curve, budget, learning_rate, seed)
        try:
            iterations = iterations_of(budget, cost, batch)
        except InputError as error:
            raise InputError(f"{path}: run {name}: {error}") from None
        if iterations > MANY_ITERATIONS:
            raise InputError(
                f"{path}: run {name}: makes {iterations:.3g} iterations; give a smaller budget"
            )
        flags = {
            "eval-interval": iterations,
            **size.flags,
            **curve.flags(model.num_sublayers),
            "train-iters": iterations,
            "lr": learning_rate,
            "seed": seed,
        }
        config = _checked(flags, f"{path}: run {name}", vocabulary)
        yield _planned(name, size.name, curve, config, flags)


def _name(size: Size, curve: Curve, budget: Budget, learning_rate: float, seed: int) -> str:
    told = budget if len(size.budgets) > 1 else None
    return run_name(size.name, curve, told, learning_rate, seed)


def _checked(flags: Mapping[str, Any], place: str, vocabulary: _Vocabulary) -> RunConfig:
    """What pretrain_attnres.py makes of the flags, without a look at the data."""
    # Where a run writes is the launcher's to say and to check; one that can be made will do.
    folder = Path(tempfile.gettempdir(), "planned_run")
    words = as_words({**flags, "run-dir": str(folder)})
    try:
        arguments = checked_arguments(words)
        vocab_size = vocabulary.size_of(tokenizer_config_of(arguments))
        return configuration_of(arguments, vocab_size)
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def _planned(
    name: str, size: str, curve: Curve, config: RunConfig, flags: Mapping[str, Any]
) -> PlannedRun:
    count = parameter_count(config.model)
    sequences = config.loop.train_iters * config.loop.global_batch_size
    return PlannedRun(
        name=name,
        size=size,
        curve=curve.name,
        learning_rate=config.optimizer.lr,
        seed=flags["seed"],
        parameters=count.total,
        non_embedding_parameters=count.non_embedding,
        tokens=sequences * config.model.seq_length,
        train_iters=config.loop.train_iters,
        flops=sequences * training_flops(config.model),
        flags=flags,
    )


def _check_names(path: Path, runs: Sequence[PlannedRun]) -> None:
    for name, times in Counter(run.name for run in runs).items():
        if times > 1:
            raise InputError(
                f"{path}: run {name} comes {times} times; give every value once, and learning "
                "rates and budgets that differ in their first six digits"
            )
