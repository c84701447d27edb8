"""Nothing of ours listens on a network, and no file that is read can run code."""

import ast
import json
import os
import pickle
import re
import signal
import socket
from contextlib import suppress
from pathlib import Path

import numpy
import psutil
import pytest
from megatron.core.datasets import blended_dataset, gpt_dataset
from transformers import AutoTokenizer, dynamic_module_utils

from megatron_attnres.data.configuration import DataConfig, TokenizerConfig
from megatron_attnres.data.datasets import build_datasets
from megatron_attnres.data.index_cache import refuse_pickled_indices
from megatron_attnres.data.tokenizers import NullTokenizer, load_tokenizer
from megatron_attnres.errors import InputError
from tests.training.checkpoints.crashes import start, wait_for_lines
from tests.training.command import ROOT, as_arguments, make_corpus, right_flags, run

MODULES_THAT_RUN_FILES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib"}
MODULES_THAT_RUN_FILES |= {"marshal", "shelve"}
# An unpickler that finds nothing but what a checkpoint needs.
MAY_IMPORT_PICKLE = ROOT / "megatron_attnres" / "training" / "checkpoints" / "safe_reader.py"
CALLS = {"eval", "exec", "os.system", "os.popen", "torch.load", "pickle.load", "pickle.loads"}
CALLS |= {"subprocess.getoutput", "subprocess.getstatusoutput"}
CALLS |= {"yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load"}
KEYWORDS_THAT_MUST_BE_FALSE = {"shell", "trust_remote_code", "allow_pickle"}
# A program in single quotes is text of the script's own.
IN_SCRIPTS = re.compile(r"(?<![\w./-])(eval\s|(ba)?sh -c (?!'))")


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return right_flags(make_corpus(folder, vocab_size=60)) | {
        "nproc-per-node": 2,
        "pipeline-model-parallel-size": 2,
        "train-iters": 400,
        "data-cache-path": folder / "cache",
        "run-dir": folder / "run",
    }


def unexplained_listeners(process: psutil.Process, stores: int = 0) -> list[tuple[str, int]]:
    """Listening sockets but torch's: the store of rank 0, and one of every loop of gloo's."""
    listening = {
        connection.laddr
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    loops = sum(_name_of(process, thread.id) == "gloo_tcp_loop" for thread in process.threads())
    # Which of them are whose does not show; their number does.
    return [] if len(listening) == loops + stores else sorted(map(tuple, listening))


def _name_of(process: psutil.Process, thread: int) -> str:
    return Path(f"/proc/{process.pid}/task/{thread}/comm").read_text().strip()


def test_a_listener_is_found():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert server.getsockname() in unexplained_listeners(psutil.Process())
    assert server.fileno() == -1
    assert unexplained_listeners(psutil.Process()) == []


def test_nothing_of_ours_listens(flags):
    process = start(flags)
    try:
        wait_for_lines(flags["run-dir"] / "metrics.jsonl", 3, process)
        launcher = psutil.Process(process.pid)
        records = sorted((flags["run-dir"] / "ranks").glob("rank_*.json"))
        ranks = [psutil.Process(json.loads(record.read_text())["pid"]) for record in records]
        assert len(ranks) == 2
        assert set(ranks) == set(launcher.children(recursive=True))
        assert unexplained_listeners(launcher) == []
        for number, one in enumerate(ranks):
            assert unexplained_listeners(one, stores=number == 0) == [], one
        assert not launcher.net_connections(kind="inet")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


class Attack:
    """Makes a folder as soon as it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_a_shuffled_index_that_runs_code(flags, tmp_path):
    """It lies beside a corpus, and Megatron-Core unpickles what is no array."""
    marker, cache = tmp_path / "marker", tmp_path / "cache"
    corpus = DataConfig((flags["data-path"],), "1", str(cache))
    build_datasets(corpus, NullTokenizer(flags["vocab-size"]), flags["seq-length"], 1, (1, 0, 0))
    [index] = cache.rglob("*-shuffle_index.npy")
    index.write_bytes(pickle.dumps(Attack(marker)))
    own = {"data-cache-path": cache, "train-iters": 2, "run-dir": None}
    answer = run(as_arguments(flags | own))
    assert (answer.status, answer.stdout) == (2, ""), answer.stderr
    [line] = [line for line in answer.stderr.splitlines() if line]
    assert f"{index} is no array of numbers; remove it" in line
    assert not marker.exists()


@pytest.mark.parametrize("module", [gpt_dataset, blended_dataset])
def test_megatron_core_reads_arrays_of_numbers_alone(module, tmp_path):
    """As its datasets do, whenever they do."""
    path, marker = tmp_path / "index.npy", tmp_path / "marker"
    path.write_bytes(pickle.dumps(Attack(marker)))
    numpy.load(path, allow_pickle=True, mmap_mode="r")
    assert marker.exists(), "numpy itself runs it"
    marker.rmdir()
    refuse_pickled_indices()
    numpy.save(path, numpy.arange(3))
    assert module.numpy.load(path, allow_pickle=True, mmap_mode="r").tolist() == [0, 1, 2]
    numpy.save(path, numpy.array([Attack(marker)], dtype=object))
    objects = path.read_bytes()
    numpy.savez(tmp_path / "several.npz", numpy.arange(3))
    several = (tmp_path / "several.npz").read_bytes()
    for content in (objects, several, pickle.dumps(Attack(marker)), b""):
        path.write_bytes(content)
        for options in ({}, {"mmap_mode": "r"}):
            with pytest.raises(InputError, match="no array of numbers"):
                module.numpy.load(path, allow_pickle=True, **options)
    assert not marker.exists()


def test_a_tokenizer_that_brings_code(tmp_path, monkeypatch):
    """Its module makes a folder when it is imported."""
    marker, folder = tmp_path / "marker", tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(marker)!r})\nclass Own: pass\n")
    configuration = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(configuration))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    with suppress(AttributeError):  # for it is no tokenizer
        AutoTokenizer.from_pretrained(str(folder), trust_remote_code=True)
    assert marker.exists(), "trusted, it would run"
    marker.rmdir()
    with pytest.raises(InputError) as caught:
        load_tokenizer(TokenizerConfig("HuggingFaceTokenizer", str(folder)))
    assert "\n" not in str(caught.value)
    assert not marker.exists()


def findings(source: str, may_import_pickle: bool = False) -> list[str]:
    """What in a module could run code that a file holds, or hand a file's name to a shell."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            found += [ast.unparse(node.func)] if ast.unparse(node.func) in CALLS else []
            found += [
                ast.unparse(keyword)
                for keyword in node.keywords
                if keyword.arg in KEYWORDS_THAT_MUST_BE_FALSE
                and ast.unparse(keyword.value) != "False"
            ]
        elif isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name in MODULES_THAT_RUN_FILES]
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES_THAT_RUN_FILES:
            found.append(f"from {node.module}")
    return [one for one in found if not (may_import_pickle and one == "pickle")]


@pytest.mark.parametrize(
    "source",
    [
        "subprocess.run('ls ' + name, shell=True)",
        "subprocess.run(name, shell=given)",
        "os.system(name)",
        "eval(text)",
        "yaml.load(text)",
        "AutoTokenizer.from_pretrained(name, trust_remote_code=True)",
        "numpy.load(name, allow_pickle=True)",
        "torch.load(name)",
        "import pickle",
        "from pickle import load",
    ],
)
def test_what_runs_code_is_found(source):
    assert findings(source)


def test_what_runs_no_code_is_not():
    source = "model.eval(); yaml.safe_load(text); run(command, shell=False); numpy.load(name)"
    assert findings(source) == []
    assert findings("import pickle", may_import_pickle=True) == []
    assert findings("import pickle; pickle.load(file)", may_import_pickle=True) == ["pickle.load"]


def test_no_source_file_runs_code():
    folders = ("megatron_attnres", "tools", "examples")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    paths.append(ROOT / "pretrain_attnres.py")
    assert MAY_IMPORT_PICKLE in paths
    found = {
        str(path): findings(path.read_text(encoding="utf-8"), path == MAY_IMPORT_PICKLE)
        for path in paths
    }
    assert {path: one for path, one in found.items() if one} == {}


def test_no_script_runs_text():
    assert IN_SCRIPTS.search('eval "$1"')
    assert IN_SCRIPTS.search("bash -c $1")
    assert not IN_SCRIPTS.search("bash -c 'exec \"$@\"' name")
    files = [path for path in (ROOT / "examples").rglob("*") if path.is_file()]
    # A picture is no text.
    scripts = [path for path in files if path.suffix != ".png"]
    assert len(scripts) > 2
    for path in scripts:
        code = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
        assert not IN_SCRIPTS.search("\n".join(code)), path
