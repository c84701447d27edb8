import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_attnres.commands import CommandParser
from megatron_attnres.errors import InputError
from megatron_attnres.model.configuration import NAMED_SIZES
from megatron_attnres.training.arguments import parse_arguments
from megatron_attnres.training.configuration import read_configuration
from tests.training.command import ROOT, as_arguments, make_corpus, right_flags


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"), vocab_size=60)


@pytest.fixture(autouse=True)
def without_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def configured(prefix):
    """Reads the right flags with others over them."""

    def configured(**changed):
        changed = {name.replace("_", "-"): value for name, value in changed.items()}
        config, _ = read_configuration(as_arguments(right_flags(prefix) | changed))
        return config

    return configured


def written(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_a_file_gives_the_same_keys_as_flags(prefix, configured, tmp_path):
    flags = right_flags(prefix) | {"attn-res-mode": "full", "lr": 0.01, "sequence-parallel": False}
    text = "".join(f"{name}: {str(value).lower()}\n" for name, value in flags.items())
    text = text.replace("nulltokenizer", "NullTokenizer").replace(prefix.lower(), prefix)
    from_file, _ = read_configuration([f"--config={written(tmp_path, text)}"])
    assert from_file == configured(attn_res_mode="full", lr=0.01)


def test_flags_win_over_the_file(configured, tmp_path):
    text = "train_iters: 7\nlr: 0.5\nsequence-parallel: true\noverlap-p2p-communication: false\n"
    config = configured(
        config=written(tmp_path, text), train_iters=9, **{"no_sequence_parallel": True}
    )
    assert (config.loop.train_iters, config.optimizer.lr) == (9, 0.5)
    assert not config.layout.sequence_parallel
    assert not config.schedule.overlap_p2p


def test_the_files_place_among_the_flags_is_of_no_account(configured, prefix, tmp_path):
    path = written(tmp_path, "train-iters: 7\n")
    arguments = as_arguments(right_flags(prefix))
    first, _ = read_configuration([f"--config={path}", *arguments])
    last, _ = read_configuration([*arguments, "--config", str(path)])
    assert first == last == configured()


def test_lists_and_nothing_in_a_file(prefix, configured, tmp_path):
    text = f"data-path: [0.5, {prefix}, 0.5, {prefix}]\nlr: null\n"
    config = configured(config=written(tmp_path, text), data_path=None)
    assert config.data.data_path == ("0.5", prefix, "0.5", prefix)
    assert config.optimizer.lr == configured().optimizer.lr
    assert configured(config=written(tmp_path, "")) == configured()


MODES = {
    "baseline": {},
    "block": {"attn_res_recency_bias": 0.5, "attn_res_sources": "cumulative"},
    "full": {"attn_res_recency_bias": 0.5},
}


@pytest.mark.parametrize("size", NAMED_SIZES)
@pytest.mark.parametrize("mode", MODES)
def test_named_sizes_in_every_mode(size, mode, configured):
    overridden = {
        "num_layers": None,
        "hidden_size": None,
        "num_attention_heads": None,
        "num_query_groups": None,
        "ffn_hidden_size": 96,
    }
    config = configured(model_size=size, attn_res_mode=mode, **overridden, **MODES[mode])
    named = vars(NAMED_SIZES[size]) | {"ffn_hidden_size": 96}
    assert {name: getattr(config.model, name) for name in named} == named
    attn_res = config.model.attn_res
    assert attn_res.mode == mode
    assert attn_res.recency_bias == MODES[mode].get("attn_res_recency_bias")
    assert attn_res.sources == MODES[mode].get("attn_res_sources", "delta")
    if mode == "full":
        assert attn_res.block_size == 1
    if mode == "block":
        assert attn_res.block_size == math.ceil(2 * named["num_layers"] / 8)


def test_sizes_without_a_name(configured):
    model = configured(num_query_groups=None, kv_channels=None).model
    assert (model.num_query_groups, model.kv_channels, model.rotary_base) == (4, 4, 10_000.0)
    assert configured(rotary_base=5.0, kv_channels=8).model.rotary_base == 5.0


@pytest.mark.parametrize(("vocab_size", "divisor", "padded"), [(60, 128, 128), (128, 8, 136)])
def test_the_vocabulary_is_padded(vocab_size, divisor, padded, configured):
    config = configured(vocab_size=vocab_size, make_vocab_size_divisible_by=divisor)
    assert config.model.vocab_size == padded


@given(layers=st.integers(1, 40), blocks=st.integers(1, 90))
def test_a_number_of_blocks_is_made_exactly_or_refused(prefix, layers, blocks):
    sublayers = 2 * layers
    sizes = [size for size in range(1, sublayers + 1) if math.ceil(sublayers / size) == blocks]
    flags = right_flags(prefix) | {"num-layers": layers, "attn-res-num-blocks": blocks}
    if sizes:
        config, _ = read_configuration(as_arguments(flags))
        assert config.model.attn_res.block_size in sizes
    else:
        with pytest.raises(InputError, match=f"^--attn-res-num-blocks {blocks}: ") as error:
            read_configuration(as_arguments(flags))
        assert "\n" not in str(error.value)


@given(layers=st.integers(1, 8), size=st.integers(-1, 18))
def test_a_block_size_is_taken_from_one_to_all_sublayers(prefix, layers, size):
    flags = right_flags(prefix) | {"num-layers": layers, "attn-res-block-size": size}
    if 1 <= size <= 2 * layers:
        assert read_configuration(as_arguments(flags))[0].model.attn_res.block_size == size
    else:
        with pytest.raises(InputError, match=f"^--attn-res-block-size {size}: "):
            read_configuration(as_arguments(flags))


def test_layout_and_schedule(configured):
    config = configured(
        nproc_per_node=8,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        global_batch_size=16,
        micro_batch_size=2,
        sequence_parallel=True,
    )
    layout = config.layout
    sizes = layout.tensor, layout.pipeline, layout.virtual_pipeline, layout.data
    assert sizes == (2, 2, 2, 2)
    assert layout.sequence_parallel
    assert (config.num_microbatches, config.schedule.microbatch_group_size) == (4, 2)


def test_the_world_is_the_launchers(configured, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert configured().layout.data == 4
    assert configured(nproc_per_node=2).layout.data == 4
    # Without a rank, a world size in the environment is a leftover.
    monkeypatch.delenv("RANK")
    assert configured().layout.data == 1


@given(
    st.sampled_from(["num-layers", "hidden-size", "num-attention-heads", "micro-batch-size"]),
    st.integers(-3, 40),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_any_sizes_are_taken_or_refused_in_one_line(prefix, name, value, tensor, pipeline, virtual):
    flags = right_flags(prefix) | {
        name: value,
        "tensor-model-parallel-size": tensor,
        "pipeline-model-parallel-size": pipeline,
        "virtual-pipeline-model-parallel-size": virtual,
        "nproc-per-node": tensor * pipeline,
        "global-batch-size": 12,
    }
    try:
        config, _ = read_configuration(as_arguments(flags))
    except InputError as error:
        assert str(error).startswith("--")
        assert "\n" not in str(error)
    else:
        layout, model = config.layout, config.model
        assert model.num_layers % (pipeline * virtual) == 0
        assert model.num_attention_heads % tensor == model.num_query_groups % tensor == 0
        assert model.hidden_size > 0 < model.kv_channels
        assert config.num_microbatches >= (pipeline if virtual > 1 else 1)
        assert layout.virtual_pipeline == 1 or layout.pipeline > 1


def test_help_explains_every_flag_in_groups(monkeypatch):
    answer = subprocess.run(
        [sys.executable, "pretrain_attnres.py", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    groups = [
        "model",
        "attention residuals",
        "parallelism",
        "data",
        "training",
        "optimizer (AdamW)",
        "validation and logging",
        "checkpoints",
    ]
    for group in groups:
        assert f"\n{group}:\n" in answer.stdout
    monkeypatch.setattr(CommandParser, "parse_args", lambda parser, _: parser)
    for action in parse_arguments([])._actions:
        assert action.option_strings[-1] in answer.stdout
        assert action.help, f"{action.option_strings} is not explained"


def test_defaults_are_the_papers():
    arguments = parse_arguments([])
    assert arguments.attn_res_mode == "block"
    assert arguments.attn_res_sources == "delta"
    assert arguments.attn_res_recency_bias is None
    assert arguments.zero_stage == 1


@pytest.mark.parametrize(("name", "value"), [("data-path", "nowhere/corpus"), ("split", "9,x")])
def test_data_is_looked_at_before_any_rank_starts(name, value, prefix):
    with pytest.raises(InputError, match=f"^--{name} {value}: "):
        read_configuration(as_arguments(right_flags(prefix) | {name: value}))
