"""Grids as files: what is read, and what is refused in one line."""

from datetime import date

import pytest

from megatron_attnres.errors import InputError
from megatron_attnres.training.sweeps.planning.budgets import Budget
from megatron_attnres.training.sweeps.planning.curves import Curve
from megatron_attnres.training.sweeps.planning.grid import read_grid
from megatron_attnres.training.sweeps.planning.run_flags import as_words
from tests.training.sweeps.planning.grids import flags, grid, sizes, written


def test_a_size_has_the_grids_values_and_its_own_over_them(tmp_path):
    own = {"tokens-per-parameter": [20, 40], "learning-rates": "3e-3", "modes": "block"}
    own |= {"num-blocks": [2, 4], "seq-length": 32}
    small, big = read_grid(written(tmp_path, grid(sizes=sizes(**own) | {"big": {}})))
    assert small.curves == (Curve("block", 2), Curve("block", 4))
    assert small.budgets == (
        Budget("tokens-per-parameter", 20),
        Budget("tokens-per-parameter", 40),
    )
    assert (small.learning_rates, small.seeds) == ((0.003,), (1,))
    assert (small.flags["seq-length"], small.flags["num-layers"]) == (32, 2)
    assert big.curves == (Curve("baseline"), Curve("block", 2), Curve("full"))
    assert (big.budgets, big.learning_rates) == ((Budget("tokens", 6400),), (0.01,))
    assert big.flags == flags()


def test_blocks_of_the_grid_are_for_the_sizes_that_have_some(tmp_path):
    own = {"small": {"modes": "block"}, "big": {}}
    small, big = read_grid(written(tmp_path, grid(sizes=own, modes="full")))
    assert (small.curves, big.curves) == ((Curve("block", 2),), (Curve("full"),))


def test_one_seed_if_none_is_given(tmp_path):
    assert read_grid(written(tmp_path, grid(seeds=None)))[0].seeds == (1,)


def test_shapes_are_sizes(tmp_path):
    shapes = {"hidden-per-layer": 30, "heads-per-layer": [0.3, 0.5], "parameters": "2e8"}
    shapes |= {"ffn-per-hidden": 4, "seeds": [4, 5]}
    small, _, *shaped = read_grid(written(tmp_path, grid(shapes=shapes)))
    assert small.seeds == (1,)
    assert [size.name for size in shaped] == ["w30h0.29", "w30h0.5"]
    assert shaped[0].flags["num-attention-heads"] == 7
    assert shaped[0].seeds == (4, 5)


def test_flags_become_words():
    given = {"lr": -1.5, "data-path": [0.5, "a b"], "async-save": False, "sequence-parallel": True}
    assert as_words(given) == [
        "--lr=-1.5",
        "--data-path",
        "0.5",
        "a b",
        "--no-async-save",
        "--sequence-parallel",
    ]


def test_underscores_and_empty_flags_are_as_in_config_files(tmp_path):
    changed = grid(flags=flags() | {"micro-batch-size": None, "adam_beta2": 0.98})
    read = read_grid(written(tmp_path, changed))[0].flags
    assert read["adam-beta2"] == 0.98
    assert "micro-batch-size" not in read


REFUSED = {
    "a tag that does not fit": ("seeds: !!bool foo", ": not YAML: "),
    "a date as a flag": (
        grid(flags=flags(data_path=date(2024, 1, 1))),
        ": flags.data-path: datetime.date(2024, 1, 1) is not allowed; give a number, text",
    ),
    "a seed that no generator takes": (
        grid(seeds=[2**32]),
        ": the grid.seeds: 4294967296 is not allowed; at most 4,294,967,295 is",
    ),
    "a seed of thousands of digits": (
        f"seeds: 0x{'f' * 5000}",
        f": line 1: 0x{'f' * 38} is a number in YAML that is not decimal; write it in decimal",
    ),
    "a list": ("[1, 2]", ": holds a list; give keys and values"),
    "nothing": ("", ": holds nothing; give keys and values"),
    "no YAML": ("flags: {", ": not YAML: "),
    "endless brackets": ("[" * 900, ": not YAML: "),
    "a key twice": ("tokens: 1\nseeds: 1\ntokens: 2\n", ": line 3: key 'tokens' is given twice"),
    "a key twice in a size": (
        "sizes:\n  a:\n    num-layers: 1\n    num-layers: 2\n",
        ": line 4: key 'num-layers' is given twice; give it once",
    ),
    "an octal number": ("seeds: 012\n", ": line 1: 012 is a number in YAML that is not decimal;"),
    "a number in base 60": ("tokens: 1:30\n", ": line 1: 1:30 is a number in YAML that is not"),
    "base 60 and a point": ("tokens: 1:30.5\n", ": line 1: 1:30.5 is a number in YAML that"),
    "an unknown key": (grid(token=5), ": unknown key 'token'; allowed are flags, sizes, shapes,"),
    "a number as key": ({1: 2}, ": key 1 is no text; put it in quotes"),
    "no size": (grid(sizes=None), ": has no size; give sizes or shapes"),
    "empty sizes": (grid(sizes={}), ": has no size; give sizes or shapes"),
    "a size that is a number": (grid(sizes={"a": 5}), ": sizes.a: is 5; give keys and values"),
    "a size's name that is a number": (
        grid(sizes={100: {}}),
        ": sizes: key 100 is no text; put it in quotes",
    ),
    "a size's name with a blank": (
        grid(sizes={"a b": {}}),
        ": sizes: 'a b' cannot name a folder; give letters, digits and",
    ),
    "a size above the folder": (grid(sizes={"..": {}}), ": sizes: '..' cannot name a folder"),
    "an unknown flag": (
        grid(sizes=sizes(hiden_size=3)),
        ": sizes.small: unknown key 'hiden-size'; give flags of pretrain_attnres.py",
    ),
    "a flag in two spellings": (
        grid(flags=flags() | {"seq_length": 5}),
        ": flags: seq-length is given twice; give it once",
    ),
    "a mapping as a flag": (grid(flags=flags(lr_warmup_iters={"a": 1})), ".lr-warmup-iters: {'a'"),
    "a list as a single value": (
        grid(flags=flags(seq_length=[16, 32])),
        ": flags.seq-length: [16, 32] is not allowed; give a single value",
    ),
    "a list of flags": (grid(flags=[]), ": flags: is []; give keys and values"),
    "NUL in a flag": (grid(flags=flags(data_path=["a\0"])), "data-path: 'a\\x00' is not allowed"),
    "a number of a hundred digits": (
        grid(flags=flags(seq_length=10**100)),
        ": flags.seq-length: is above 1e+18; give a smaller number",
    ),
    "no modes": (grid(modes=None), ": sizes.small: has no modes; give modes, in it or in the grid"),
    "no learning rates": (grid(learning_rates=None), ": sizes.small: has no learning-rates; give"),
    "no budget": (
        grid(tokens=None),
        ": sizes.small: has no budgets; give tokens, tokens-per-parameter or compute, in it or",
    ),
    "no blocks": (grid(num_blocks=None), ": sizes.small: has mode block and no num-blocks; give"),
    "blocks without a mode": (
        grid(modes="full"),
        ": has num-blocks, but no block among its modes; add it to modes",
    ),
    "blocks without a mode in a size": (
        grid(sizes=sizes(modes="full", num_blocks=[2, 4])),
        ": sizes.small: has num-blocks, but no block among its modes; add it to modes",
    ),
    "an unknown mode": (grid(modes=["blok"]), "modes: 'blok' is not allowed; give one of baseline"),
    "a list in a list": (grid(modes=[["full"]]), "modes: ['full'] is not allowed; give one of"),
    "no seed": (grid(seeds=[]), ": the grid.seeds: is empty; give at least one value"),
    "half a seed": (grid(seeds=1.5), ".seeds: 1.5 is not allowed; give a whole number of at"),
    "true as a seed": (grid(seeds=True), ".seeds: True is not allowed; give a whole number"),
    "a negative learning rate": (
        grid(sizes=sizes(learning_rates=[0.1, -1])),
        ": sizes.small.learning-rates: -1 is not allowed; give a number above 0",
    ),
    "text as tokens": (grid(tokens="many"), ".tokens: 'many' is not allowed; give a number above"),
    "compute without unit": (
        grid(tokens=None, compute=3e13),
        '.compute: 30000000000000.0 has no unit that is known; give e.g. "3 FLOPs" or "3 PFLOP/s',
    ),
    "two budgets": (grid(compute="3 FLOPs"), ": the grid: has tokens and compute; give one"),
    "a flag beside shapes": (
        grid(shapes={"hiden-per-layer": 3}),
        ": shapes: unknown key 'hiden-per-layer'; allowed are hidden-per-layer, heads-per-layer,",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_grids_are_one_line(tmp_path, case):
    content, said = REFUSED[case]
    path = written(tmp_path, content)
    with pytest.raises(InputError) as refused:
        read_grid(path)
    message = str(refused.value)
    assert message.startswith(f"{path}: ")
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        ("train-iters", "give tokens, tokens-per-parameter or compute"),
        ("lr", "give learning-rates"),
        ("seed", "give seeds"),
        ("attn-res-mode", "give modes"),
        ("attn_res_num_blocks", "give num-blocks"),
        ("attn-res-block-size", "give num-blocks"),
        ("run-dir", "leave it to launch_sweep.py run"),
        ("load", "leave it to launch_sweep.py run"),
        ("metrics-file", "leave it to launch_sweep.py run"),
        ("config", "write its keys here"),
    ],
)
def test_flags_that_are_decided_elsewhere_name_the_way_out(tmp_path, flag, instead):
    for changed in (grid(flags=flags() | {flag: 1}), grid(sizes=sizes() | {"a": {flag: 1}})):
        with pytest.raises(InputError, match=f"{flag} cannot be given here; {instead}"):
            read_grid(written(tmp_path, changed))


def test_a_grid_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match=r"a\.yaml: No such file or directory; give a readable"):
        read_grid(tmp_path / "a.yaml")
