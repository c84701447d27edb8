"""Runs of a grid, and the grids of examples/scaling."""

from dataclasses import asdict

import pytest

from megatron_attnres.errors import InputError
from megatron_attnres.model.flops import training_flops
from megatron_attnres.training.configuration import checked_arguments, configuration_of
from megatron_attnres.training.sweeps.planned_run import PlannedRun
from megatron_attnres.training.sweeps.planning.planner import plan_runs
from megatron_attnres.training.sweeps.planning.run_flags import as_words
from tests.training.command import ROOT
from tests.training.sweeps.planning.grids import flags, grid, sizes, written

EXAMPLES = ROOT / "examples" / "scaling"
ONE_CURVE = {"modes": "full", "num_blocks": None, "sizes": sizes()}
# Activated parameters and tokens of the paper's table 2.
PAPER = {
    "194m": (194e6, 38.7e9),
    "241m": (241e6, 45.4e9),
    "296m": (296e6, 62.1e9),
    "436m": (436e6, 87.9e9),
    "528m": (528e6, 119e9),
}


@pytest.fixture(autouse=True)
def without_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def planned(tmp_path):
    """Plans the small grid with other keys over it."""

    def planned(**changed) -> list[PlannedRun]:
        return plan_runs(written(tmp_path, grid(**changed)))

    return planned


def test_runs_are_the_product_in_the_grids_order(planned):
    runs = planned(modes=["full", "block"], num_blocks=[2, 4], seeds=[3, 1], learning_rates=[1, 2])
    small = [
        f"small-{curve}-lr{lr}-seed{seed}"
        for curve in ("full", "block2", "block4")
        for lr in (1, 2)
        for seed in (3, 1)
    ]
    assert [run.name for run in runs[:12]] == small
    assert [run.name for run in runs[12:]] == [name.replace("small", "big") for name in small]


def test_a_run_in_full(planned):
    run = planned(modes="block", sizes=sizes())[0]
    assert asdict(run) == {
        "name": "small-block2-lr0.01-seed1",
        "size": "small",
        "curve": "block2",
        "learning_rate": 0.01,
        "seed": 1,
        # Two layers of 4 x 16 x 16 + 3 x 16 x 32 + 2 x 16 + 2 x 4, five reads of 2 x 16, a norm.
        "parameters": 128 * 16 + 5376,
        "non_embedding_parameters": 5376,
        "tokens": 6400,
        "train_iters": 100,
        # Of a token: 2 x (matrices and head) + 4 x 16 tokens x 16 in two layers, reads of
        # 1 + 2 + 2 + 3 + 3 sources; three times for backward.
        "flops": 6400 * 3 * (2 * (5120 + 2048) + 2 * 1024 + 4 * 16 * 11),
        "flags": flags()
        | {
            "num-layers": 2,
            "hidden-size": 16,
            "ffn-hidden-size": 32,
            "num-attention-heads": 4,
            "eval-interval": 100,
            "attn-res-mode": "block",
            "attn-res-num-blocks": 2,
            "train-iters": 100,
            "lr": 0.01,
            "seed": 1,
        },
    }


def test_flags_are_those_of_pretraining_and_give_the_runs_numbers(planned):
    for run in planned():
        config = configuration_of(checked_arguments(as_words(run.flags)), vocab_size=61)
        assert config.model.attn_res.mode in run.curve
        sequences = config.loop.train_iters * config.loop.global_batch_size
        assert run.tokens == sequences * config.model.seq_length
        assert run.flops == sequences * training_flops(config.model)
        assert (config.optimizer.lr, run.seed) == (run.learning_rate, run.flags["seed"])
        assert config.loop.eval_interval == run.train_iters


def test_flags_that_take_lists(planned):
    changed = flags(data_path=[0.5, "a", 0.5, "b"], nproc_per_node=2)
    changed |= {"pipeline-model-parallel-size": 2, "pipeline-layers-per-chunk": [1, 1]}
    run = planned(flags=changed, sizes=sizes())[0]
    config = configuration_of(checked_arguments(as_words(run.flags)), vocab_size=61)
    assert config.data.data_path == ("0.5", "a", "0.5", "b")
    assert config.layout.layers_per_chunk == (1, 1)


def test_the_grids_validation_stays(planned):
    assert {run.flags["eval-interval"] for run in planned(flags=flags(eval_interval=7))} == {7}


def test_budgets_are_named_where_there_are_several(planned):
    runs = planned(tokens=[6400, 12800], **ONE_CURVE)
    assert [(run.name, run.tokens) for run in runs] == [
        ("small-full-6400tokens-lr0.01-seed1", 6400),
        ("small-full-12800tokens-lr0.01-seed1", 12800),
    ]
    runs = planned(tokens=None, compute=["1e9 FLOPs", "2e9 FLOPs"], **ONE_CURVE)
    assert runs[1].name == "small-full-2e+09FLOPs-lr0.01-seed1"
    assert runs[1].flops == pytest.approx(2e9, rel=0.01)


def test_blocks_that_cannot_be_equal_are_as_pretraining_makes_them(planned):
    """26 sublayers in 8 blocks: 4 sublayers each, 7 blocks."""
    runs = planned(sizes=sizes(num_layers=13), num_blocks=[8, 13], modes="block")
    assert runs[0].flags["attn-res-block-size"] == 4
    assert "attn-res-num-blocks" not in runs[0].flags
    assert runs[1].flags["attn-res-num-blocks"] == 13


def test_depth_attentions_flags_go_to_those_that_have_it(planned):
    runs = planned(flags=flags(attn_res_recency_bias=1.0), modes=["block", "full"])
    assert len(runs) == 4
    with pytest.raises(InputError, match=r"run small-baseline-lr0.01-seed1: --attn-res-recency-b"):
        planned(flags=flags(attn_res_recency_bias=1.0))


def test_the_vocabulary_is_padded_and_can_be_given(planned, tmp_path):
    missing = flags(tokenizer_type="SentencePieceTokenizer", tokenizer_model="nowhere.model")
    changed = grid(flags=missing | {"vocab-size": None}, **ONE_CURVE)
    with pytest.raises(InputError) as refused:
        plan_runs(written(tmp_path, changed))
    assert str(refused.value).startswith(
        f"{tmp_path}/grid.yaml: sizes.small: --tokenizer-model now"
    )
    assert str(refused.value).endswith("; or plan with --vocab-size N")
    run = plan_runs(written(tmp_path, changed), vocab_size=129)[0]
    assert run.parameters - run.non_embedding_parameters == 256 * 16


REFUSED = {
    "wrong type": (
        {"sizes": sizes(num_layers="two")},
        "sizes.small: --num-layers: invalid int value: 'two'; see --help",
    ),
    "a flag that takes no value": (
        {"flags": flags(async_save=3)},
        "sizes.small: --async-save/--no-async-save: ignored explicit argument '3'; see --help",
    ),
    "a value for a switch's place": (
        {"flags": flags(split=True)},
        "sizes.small: --split: expected one argument; see --help",
    ),
    "heads that do not divide": (
        {"sizes": sizes(num_attention_heads=3)},
        "sizes.small: --hidden-size 16: must be divisible by --num-attention-heads 3; or give",
    ),
    "no data": ({"flags": flags(data_path=None)}, "sizes.small: --data-path is missing; give it"),
    "no batch": ({"flags": flags(global_batch_size=None)}, "sizes.small: --global-batch-size is m"),
    "a warm-up as long as the run": (
        {"flags": flags(lr_warmup_iters=100)},
        "run small-baseline-lr0.01-seed1: --lr-warmup-iters 100: must be below --lr-decay-iters",
    ),
    "more blocks than sublayers": (
        {"num_blocks": 5},
        "run small-block5-lr0.01-seed1: --attn-res-num-blocks 5: must be from 1 to the model's 4",
    ),
    "a seed twice": ({"seeds": [1, 2, 1]}, "run small-baseline-lr0.01-seed1 comes 2 times; give"),
    "learning rates that look alike": (
        {"learning_rates": [0.1, 0.10000001]},
        "run small-baseline-lr0.1-seed1 comes 2 times; give",
    ),
    "more iterations than anybody has": (
        {"tokens": "6.4e25"},
        "run small-baseline-lr0.01-seed1: makes 1e+24 iterations; give a smaller budget",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_values_are_one_line_that_names_file_and_run(planned, tmp_path, case):
    changed, said = REFUSED[case]
    with pytest.raises(InputError) as refused:
        planned(**changed)
    assert str(refused.value).startswith(f"{tmp_path}/grid.yaml: {said}")
    assert "\n" not in str(refused.value)


def test_the_laptop_grid():
    runs = plan_runs(EXAMPLES / "laptop.yaml", vocab_size=2048)
    iterations = {run.size: run.train_iters for run in runs}
    assert list(iterations.values()) == [488, 684, 879, 1074, 1172]
    assert len(runs) == 21
    assert {run.curve for run in runs} == {"baseline", "block4", "full"}
    assert all("attn-res-num-blocks" in run.flags for run in runs if run.curve == "block4")


def test_the_grid_of_the_laptops_learning_rates():
    """Of the same sizes, and around the rates that were chosen."""
    tried = plan_runs(EXAMPLES / "laptop_learning_rates.yaml", vocab_size=2048)
    assert len(tried) == 16
    for run in plan_runs(EXAMPLES / "laptop.yaml", vocab_size=2048):
        rates = [other.learning_rate for other in tried if other.size == run.size]
        assert min(rates) < run.learning_rate < max(rates)
        assert run.learning_rate in rates
        if run.curve == "baseline":
            assert {other.flops for other in tried if other.size == run.size} == {run.flops}


def test_the_papers_table():
    runs = plan_runs(EXAMPLES / "paper_table2.yaml")
    assert len(runs) == 15
    assert {run.size for run in runs} == set(PAPER)
    for run in runs:
        parameters, tokens = PAPER[run.size]
        assert run.non_embedding_parameters == pytest.approx(parameters, rel=0.01)
        assert run.tokens == pytest.approx(tokens, rel=0.001)


def test_the_sweep_of_shapes():
    runs = plan_runs(EXAMPLES / "shapes.yaml")
    assert len(runs) == 50
    for run in runs:
        assert run.non_embedding_parameters == pytest.approx(2e8, rel=0.03)
        assert abs(run.flops - 0.8 * 8.64e19) <= run.flops / run.train_iters
