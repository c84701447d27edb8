"""Bad values and files end in one line that names them, status 2, and nothing written."""

import shutil
import subprocess
import sys

import pytest

from tests.training.command import ROOT, as_arguments, make_corpus, right_flags, run, tree

# Several stages on one machine, before any of them is started.
STAGES = {"nproc-per-node": 2, "pipeline-model-parallel-size": 2}


@pytest.fixture(scope="session")
def prefix(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"), vocab_size=60)


@pytest.fixture
def outputs(tmp_path):
    """Flags of every output that a run can have, in a folder that is still empty."""
    return {
        "save": tmp_path / "out" / "checkpoints",
        "metrics-file": tmp_path / "out" / "metrics.jsonl",
        "summary-file": tmp_path / "out" / "summary.json",
        "tensorboard-dir": tmp_path / "out" / "events",
        "data-cache-path": tmp_path / "out" / "cache",
    }


def refused(flags, *words, folder=None, timeout=120.0, **environment):
    """Run, and hold the answer against the rules; returns its line."""
    before = tree(folder) if folder else None
    answer = run(as_arguments(flags), timeout, **environment)
    assert answer.status == 2, answer
    lines = [line for line in answer.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, answer.stderr
    assert not answer.stdout.strip()
    assert lines[0].startswith("pretrain_attnres.py: ")
    for word in words:
        assert str(word) in lines[0]
    if folder:
        assert tree(folder) == before
    return lines[0]


FLAGS = {
    # The pipeline.
    "layers for P": (STAGES | {"num-layers": 3}, "--num-layers 3", "divisible", "= 2"),
    "layers for P x V": (
        STAGES | {"virtual-pipeline-model-parallel-size": 3},
        "--num-layers 4",
        "--pipeline-model-parallel-size 2 x --virtual-pipeline-model-parallel-size 3 = 6",
    ),
    "V without P": (
        {"virtual-pipeline-model-parallel-size": 2},
        "--virtual-pipeline-model-parallel-size 2",
        "--pipeline-model-parallel-size of 2 or more",
    ),
    "too few micro-batches": (
        STAGES | {"virtual-pipeline-model-parallel-size": 2, "global-batch-size": 1},
        "--global-batch-size 1",
        "1 micro-batches",
        "at least 2",
    ),
    "group below P": (
        STAGES
        | {
            "virtual-pipeline-model-parallel-size": 2,
            "microbatch-group-size-per-virtual-pipeline-stage": 1,
        },
        "--microbatch-group-size-per-virtual-pipeline-stage 1",
        "from 2",
        "to 4",
    ),
    "group above the micro-batches": (
        STAGES
        | {
            "virtual-pipeline-model-parallel-size": 2,
            "microbatch-group-size-per-virtual-pipeline-stage": 5,
        },
        "--microbatch-group-size-per-virtual-pipeline-stage 5",
        "to 4",
    ),
    "last group below P": (
        STAGES | {"virtual-pipeline-model-parallel-size": 2, "global-batch-size": 5},
        "--global-batch-size 5",
        "last group has 1",
        "multiple of 2",
    ),
    # Blocks.
    "block size 0": ({"attn-res-block-size": 0}, "--attn-res-block-size 0", "from 1 to", "8 sub"),
    "block size -1": (
        {"attn-res-block-size": -1},
        "--attn-res-block-size -1",
        "from 1 to",
        "8 sub",
    ),
    "block size above L": ({"attn-res-block-size": 9}, "--attn-res-block-size 9", "1 to", "8 sub"),
    "blocks 0": ({"attn-res-num-blocks": 0}, "--attn-res-num-blocks 0", "from 1 to", "8 sub"),
    "blocks above L": ({"attn-res-num-blocks": 9}, "--attn-res-num-blocks 9", "8 sublayers"),
    "blocks of no size": (
        {"attn-res-num-blocks": 5},
        "--attn-res-num-blocks 5",
        "make 4",
        "make 8",
    ),
    "both block flags": (
        {"attn-res-num-blocks": 2, "attn-res-block-size": 4},
        "--attn-res-num-blocks 2 and --attn-res-block-size 4",
        "one of the two",
    ),
    "block size in full mode": (
        {"attn-res-mode": "full", "attn-res-block-size": 2},
        "--attn-res-block-size 2",
        "--attn-res-mode block",
    ),
    "blocks in the baseline": (
        {"attn-res-mode": "baseline", "attn-res-num-blocks": 2},
        "--attn-res-num-blocks 2",
        "--attn-res-mode block",
    ),
    "bias in the baseline": (
        {"attn-res-mode": "baseline", "attn-res-recency-bias": 0},
        "--attn-res-recency-bias 0",
        "block or full",
    ),
    "sources of the baseline": (
        {"attn-res-mode": "baseline", "attn-res-sources": "cumulative"},
        "--attn-res-sources cumulative",
        "block or full",
    ),
    "bias huge": ({"attn-res-recency-bias": "1e39"}, "--attn-res-recency-bias 1e+39", "float32"),
    "bias nan": ({"attn-res-recency-bias": "nan"}, "--attn-res-recency-bias nan", "finite"),
    "unknown mode": ({"attn-res-mode": "half"}, "--attn-res-mode", "half", "baseline", "full"),
    # Batches.
    "batch for the micro-batch": (
        {"micro-batch-size": 3},
        "--global-batch-size 4",
        "--micro-batch-size 3 x 1",
    ),
    "batch for the replicas": (
        {"nproc-per-node": 3},
        "--global-batch-size 4",
        "--micro-batch-size 1 x 3 data-parallel ranks",
    ),
    # Tensor parallelism.
    "heads for TP": (
        {"nproc-per-node": 3, "tensor-model-parallel-size": 3},
        "--num-attention-heads 4",
        "--tensor-model-parallel-size 3",
    ),
    "groups for TP": (
        {"nproc-per-node": 4, "tensor-model-parallel-size": 4},
        "--num-query-groups 2",
        "--tensor-model-parallel-size 4",
    ),
    "ffn for TP": (
        {"nproc-per-node": 2, "tensor-model-parallel-size": 2, "ffn-hidden-size": 33},
        "--ffn-hidden-size 33",
        "--tensor-model-parallel-size 2",
    ),
    "vocabulary for TP": (
        {
            "nproc-per-node": 2,
            "tensor-model-parallel-size": 2,
            "make-vocab-size-divisible-by": 1,
        },
        "--make-vocab-size-divisible-by",
        "61",
        "--tensor-model-parallel-size 2",
    ),
    "sequence for TP": (
        {
            "nproc-per-node": 2,
            "tensor-model-parallel-size": 2,
            "sequence-parallel": True,
            "seq-length": 15,
        },
        "--seq-length 15",
        "--tensor-model-parallel-size 2",
    ),
    "sequence parallel without TP": (
        {"sequence-parallel": True},
        "--sequence-parallel",
        "--tensor-model-parallel-size of 2 or more",
    ),
    "groups for heads": ({"num-query-groups": 3}, "--num-query-groups 3", "attention-heads 4"),
    "width of heads": ({"hidden-size": 18}, "--hidden-size 18", "--num-attention-heads 4"),
    "odd head": ({"kv-channels": 5}, "--kv-channels 5", "even"),
    # Ranks.
    "too few ranks": (
        {"pipeline-model-parallel-size": 2},
        "--pipeline-model-parallel-size 2",
        "multiple of 2",
        "has 1",
    ),
    "odd ranks": (
        STAGES | {"nproc-per-node": 3},
        "--tensor-model-parallel-size 1 x --pipeline-model-parallel-size 2",
        "has 3",
    ),
    "no ranks": ({"nproc-per-node": 0}, "--nproc-per-node 0", "above 0"),
    # Single values.
    "not a number": ({"train-iters": "many"}, "--train-iters", "many", "int"),
    "zero": ({"train-iters": 0}, "--train-iters 0", "above 0"),
    "negative": ({"lr": -1.0}, "--lr -1.0", "above 0"),
    "nan": ({"lr": "nan"}, "--lr nan", "above 0"),
    "infinite": ({"clip-grad": "inf"}, "--clip-grad inf", "0 or more"),
    "beta": ({"adam-beta2": 1.0}, "--adam-beta2 1.0", "below 1"),
    "dropout": ({"hidden-dropout": 1.0}, "--hidden-dropout 1.0", "below 1"),
    "missing": ({"train-iters": None}, "--train-iters", "missing"),
    "no size": ({"hidden-size": None}, "--hidden-size", "missing", "--model-size"),
    "unknown size": ({"model-size": "7b"}, "--model-size", "7b", "tiny"),
    "unknown flag": ({"attn-res": "block"}, "--attn-res=block"),
    "abbreviated flag": ({"train-iter": 5}, "--train-iter=5"),
    "warm-up": ({"lr-warmup-iters": 1}, "--lr-warmup-iters 1", "below", "is 1"),
    "lowest rate": ({"min-lr": 1.0}, "--min-lr 1.0", "--lr 0.0003"),
    "WSD alone": ({"lr-decay-style": "WSD"}, "--lr-decay-style WSD", "--lr-wsd-decay-iters"),
    "WSD too long": (
        {"lr-decay-style": "WSD", "lr-wsd-decay-iters": 2},
        "--lr-wsd-decay-iters 2",
        "fit into 1",
    ),
    "decay without WSD": ({"lr-wsd-decay-iters": 1}, "--lr-wsd-decay-iters 1", "WSD"),
    "offload without ZeRO": (
        {"zero-cpu-offload": True, "zero-stage": 0},
        "--zero-cpu-offload",
        "--zero-stage 1",
    ),
    "ZeRO 2": ({"zero-stage": 2}, "--zero-stage", "2", "0, 1"),
    "summary without metrics": ({"metrics-file": None}, "--summary-file", "--metrics-file"),
    "interval without folder": (
        {"save": None, "save-interval": 5},
        "--save-interval 5",
        "--save DIR",
    ),
    # Data.
    "no data": ({"data-path": None}, "--data-path", "missing"),
    "missing data": ({"data-path": "nowhere/corpus"}, "nowhere/corpus.idx", "does not exist"),
    "half a blend": ({"data-path": ["0.5", "nowhere", "x"]}, "--data-path", "0.5 nowhere x"),
    "split": ({"split": "9,x"}, "--split 9,x", "shares"),
    "no tokenizer": ({"tokenizer-type": "SentencePieceTokenizer"}, "--tokenizer-model", "missing"),
    "no vocabulary": ({"vocab-size": None}, "--vocab-size", "missing"),
    "missing tokenizer": (
        {"tokenizer-type": "SentencePieceTokenizer", "tokenizer-model": "nowhere.model"},
        "--tokenizer-model nowhere.model",
        "no such file",
    ),
    "foreign tokenizer": (
        {"tokenizer-type": "SentencePieceTokenizer", "tokenizer-model": "setup.py"},
        "--tokenizer-model setup.py",
        "not a readable SentencePiece model",
    ),
    # Outputs and checkpoints.
    "metrics in a file": ({"metrics-file": "setup.py/m"}, "--metrics-file setup.py/m", "folder"),
    "metrics over a folder": ({"metrics-file": "tests"}, "--metrics-file tests", "is a folder"),
    "summary over a folder": ({"summary-file": "tests"}, "--summary-file tests", "is a folder"),
    "save into a file": ({"save": "setup.py"}, "--save setup.py", "written"),
    "save below a file": ({"save": "setup.py/a/b"}, "--save setup.py/a/b", "written"),
    "events in a file": ({"tensorboard-dir": "setup.py"}, "--tensorboard-dir setup.py", "written"),
    "cache in a file": ({"data-cache-path": "setup.py"}, "--data-cache-path setup.py", "written"),
    "missing checkpoint": ({"load": "nowhere"}, "--load nowhere", "--save"),
    "latest of nothing": ({"load": "latest", "save": None}, "--load latest", "--save DIR"),
    "auto of nothing": ({"load": "auto", "save": None}, "--load auto", "--save DIR"),
    "weights of nothing": ({"load-weights-only": True}, "--load-weights-only", "--load DIR"),
    "signal without save": ({"save-on-signal": True, "save": None}, "--save-on-signal", "--save"),
    "keep none": ({"keep-last": 0}, "--keep-last 0", "above 0"),
    "keep without save": ({"keep-last": 2, "save": None}, "--keep-last 2", "--save DIR"),
    "keep every alone": ({"keep-every": 4}, "--keep-every 4", "--keep-last"),
    "retries": ({"save-retries": -1}, "--save-retries -1", "0 or more"),
    "duration": ({"exit-duration-minutes": 0}, "--exit-duration-minutes 0", "above 0"),
    "checkpoint a file": ({"load": "setup.py"}, "--load setup.py", "--save"),
    # Watching.
    "no heartbeat": ({"heartbeat-seconds": 0}, "--heartbeat-seconds 0", "above 0"),
    "heartbeat nan": ({"heartbeat-seconds": "nan"}, "--heartbeat-seconds nan", "above 0"),
    "skipped steps": ({"max-skipped-steps": -1}, "--max-skipped-steps -1", "0 or more"),
    "no window": ({"alarm-window": 0}, "--alarm-window 0", "above 0"),
    "spike": ({"loss-spike-deviations": -1}, "--loss-spike-deviations -1", "0 or more"),
    "norm alarm": ({"grad-norm-alarm-ratio": "inf"}, "--grad-norm-alarm-ratio inf", "0 or more"),
    "stragglers": ({"straggler-interval": -1}, "--straggler-interval -1", "0 or more"),
    "straggler ratio": ({"straggler-ratio": 0.5}, "--straggler-ratio 0.5", "1 or more"),
    "straggler nan": ({"straggler-ratio": "nan"}, "--straggler-ratio nan", "1 or more"),
    "peak": ({"peak-tflops": 0}, "--peak-tflops 0", "above 0"),
    **{
        f"exit status {status}": (
            {"exit-status-when-stopped": status},
            f"--exit-status-when-stopped {status}",
            "0 or from 4 to 255",
        )
        for status in (-1, 1, 2, 3, 256)
    },
    "empty run folder": ({"run-dir": ""}, "--run-dir", "is empty"),
    "run folder a file": ({"run-dir": "setup.py"}, "--run-dir setup.py", "written"),
    "run below a file": ({"run-dir": "setup.py/a"}, "--run-dir setup.py/a", "written"),
    "only a run folder, a file": (
        {"run-dir": "setup.py", "save": None, "metrics-file": None, "tensorboard-dir": None},
        "--run-dir setup.py",
        "written",
    ),
    "W&B without run folder": ({"wandb-project": "x"}, "--wandb-project x", "--run-dir DIR"),
    "W&B mode": ({"wandb-mode": "shared"}, "--wandb-mode", "shared", "online", "offline"),
}


@pytest.mark.parametrize("case", FLAGS)
def test_bad_flags(case, prefix, outputs, tmp_path):
    changed, *words = FLAGS[case]
    refused(right_flags(prefix) | outputs | changed, *words, folder=tmp_path, timeout=60)


FILES = {
    "unknown key": ("learning-rate: 1\n", "'learning-rate'", "allowed are", "lr, "),
    "wrong type": ("train-iters: many\n", "--train-iters", "many"),
    "fraction": ("train_iters: 1.5\n", "--train-iters", "1.5"),
    "no boolean": ("sequence-parallel: 1\n", "sequence-parallel is 1", "true and false"),
    "boolean": ("save: true\n", "save is True", "single value"),
    "list": ("train-iters: [1, 2]\n", "train-iters is [1, 2]", "single value"),
    "mapping": ("save: {a: 1}\n", "save is {'a': 1}", "single value"),
    "bad value": ("attn-res-mode: half\n", "--attn-res-mode", "half", "baseline"),
    "not YAML": ("a: [1\nb: 2\n", "not YAML"),
    "not text": (b"\xff\xfe\x00", "not YAML"),
    "a key twice": ("seed: 1\nlr: 1\nseed: 2\n", "line 3: key 'seed' is given twice; give it once"),
    "an octal number": ("seed: 012\n", "line 1: 012 is a number in YAML that is not decimal"),
    "no date": ("seed: 2020-13-45\n", "not YAML"),
    "no keys": ("- 1\n- 2\n", "list"),
}


@pytest.mark.parametrize("case", FILES)
def test_bad_configuration_files(case, prefix, outputs, tmp_path):
    content, *words = FILES[case]
    path = tmp_path / "run.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    flags = right_flags(prefix) | outputs | {"train-iters": None, "save": None, "config": path}
    names_file = [] if words[0].startswith("--") else [f"--config {path}"]
    refused(flags, *names_file, *words, folder=tmp_path, timeout=60)


@pytest.mark.parametrize("path", ["nowhere.yaml", "tests"])
def test_unreadable_configuration_files(path, prefix):
    refused(right_flags(prefix) | {"config": path}, f"--config {path}", "readable", timeout=60)


def damage_nothing(path):
    path.unlink()


def damage_all(path):
    path.write_bytes(b"")


def damage_end(path):
    path.write_bytes(path.read_bytes()[:-3])


def damage_kind(path):
    path.write_bytes(b"PK\x03\x04" + b"not made by Megatron-Core" * 400)


@pytest.mark.parametrize("ranks", [None, 4])
@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (damage_nothing, "does not exist"),
        (damage_all, "is empty"),
        (damage_end, "truncated"),
        (damage_kind, "preprocess_data.py"),
    ],
)
def test_bad_data_files(damage, word, suffix, ranks, prefix, outputs, tmp_path):
    for kind in (".bin", ".idx"):
        shutil.copy(prefix + kind, tmp_path / f"copy{kind}")
    damaged = tmp_path / f"copy{suffix}"
    damage(damaged)
    flags = right_flags(tmp_path / "copy") | outputs | {"nproc-per-node": ranks}
    refused(flags, f"--data-path {tmp_path / 'copy'}", damaged, word, folder=tmp_path, timeout=60)


def test_ranks_of_another_launcher_answer_once(prefix):
    flags = right_flags(prefix) | {"num-layers": 3, "pipeline-model-parallel-size": 2}
    refused(flags, "--num-layers 3", timeout=60, RANK="0", WORLD_SIZE="2")
    silent = run(as_arguments(flags), timeout=60, RANK="1", WORLD_SIZE="2")
    assert silent == (2, "", "")


def test_the_launchers_ranks_count_whatever_the_flag_says(prefix):
    flags = right_flags(prefix) | {"nproc-per-node": 2, "global-batch-size": 6}
    refused(flags, "x 4 data-parallel", timeout=60, RANK="0", WORLD_SIZE="4")


def test_flags_and_files_are_checked_before_torch_is_loaded(prefix):
    code = (
        "import sys; from megatron_attnres.training.configuration import read_configuration; "
        "read_configuration(sys.argv[1:]); print(*sorted(sys.modules))"
    )
    arguments = as_arguments(right_flags(prefix))
    answer = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    loaded = answer.stdout.split()
    assert "megatron_attnres.training.checks" in loaded, answer.stderr
    assert not {"torch", "deepspeed", "megatron.core"} & set(loaded)


# What only running ranks can tell. Starting them takes seconds, so there is one run of each kind.


@pytest.fixture(scope="session")
def trained(prefix, tmp_path_factory):
    """Flags of a run that has left a checkpoint of two stages; not to be changed."""
    folder = tmp_path_factory.mktemp("trained")
    flags = right_flags(prefix) | STAGES | {"data-cache-path": folder / "cache"}
    answer = run(as_arguments(flags | {"save": folder / "checkpoints"}), timeout=240)
    assert answer.status == 0, answer
    return flags, folder / "checkpoints"


@pytest.fixture
def resumed(trained, tmp_path):
    """Flags that resume from a copy of the checkpoint, and the copy."""
    flags, saved = trained
    copy = tmp_path / "checkpoints"
    shutil.copytree(saved, copy)
    return flags | {"load": copy, "metrics-file": tmp_path / "m.jsonl", "train-iters": 2}, copy


def test_a_checkpoint_holds_one_file_a_rank(trained):
    names = sorted(str(path.relative_to(trained[1])) for path in trained[1].rglob("*"))
    files = (".metadata", "__0_0.distcp", "__1_0.distcp", "checksums.json", "run.json")
    folder = "iter_0000001"
    assert names == [folder, *(f"{folder}/{name}" for name in files), "latest"]


def test_a_checkpoint_of_another_model(resumed, tmp_path):
    flags, copy = resumed
    words = f"--load {copy}", "model.ffn_hidden_size = 32", "the run has 64"
    refused(flags | {"ffn-hidden-size": 64}, *words, folder=tmp_path, timeout=240)


def test_a_checkpoint_of_another_order_of_data(resumed, tmp_path):
    flags, copy = resumed
    words = f"--load {copy}", "data.seed = 1234", "the run has 5"
    refused(flags | {"seed": 5}, *words, folder=tmp_path, timeout=240)


def test_a_checkpoint_whose_last_rank_is_damaged(resumed, tmp_path):
    flags, copy = resumed
    path = copy / "iter_0000001" / "__1_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    refused(flags, f"--load {copy}", path, "damaged", folder=tmp_path, timeout=240)


def test_token_ids_beyond_the_vocabulary(tmp_path):
    prefix = make_corpus(tmp_path, vocab_size=300)
    flags = right_flags(prefix) | STAGES | {"metrics-file": tmp_path / "m.jsonl"}
    line = refused(flags, f"--data-path {prefix}", f"{prefix}.bin", "0 to 60", folder=tmp_path)
    assert 61 <= int(line.split("token id ")[1].split(";")[0]) <= 300


def test_a_split_without_validation_data(prefix, tmp_path):
    flags = right_flags(prefix) | {"split": "1,0,0", "eval-interval": 1}
    flags |= {"metrics-file": tmp_path / "m.jsonl", "data-cache-path": tmp_path / "cache"}
    refused(flags, "--split 1,0,0", "validation", folder=tmp_path)
