"""The command that serves the page, as a user starts and ends it."""

import os
import runpy
import signal
import socket
import subprocess
import sys
import urllib.request
from importlib.util import find_spec

import pytest

from megatron_attnres.data.configuration import TokenizerConfig
from megatron_attnres.errors import InputError
from tests.evaluation.checkpoints import make_checkpoint
from tests.layouts import small_model
from tests.training.command import HIDDEN_VARIABLES, ROOT

TOOL = ROOT / "tools" / "app.py"
needs_gradio = pytest.mark.skipif(
    find_spec("gradio") is None, reason="needs gradio (pip install 'megatron_attnres[app]')"
)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def refusal(*arguments):
    main = runpy.run_path(str(TOOL))["main"]
    with pytest.raises(InputError) as caught:
        main([str(one) for one in arguments])
    assert "\n" not in str(caught.value)
    return str(caught.value)


@needs_gradio
def test_it_serves_until_it_is_ended(tmp_path):
    model = small_model(num_layers=2, mode="full")
    make_checkpoint(tmp_path, model, TokenizerConfig("NullTokenizer", vocab_size=60))
    port = free_port()
    environment = {name: v for name, v in os.environ.items() if name not in HIDDEN_VARIABLES}
    process = subprocess.Popen(
        [sys.executable, TOOL, "--load", tmp_path, tmp_path, "--port", str(port)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        assert line == f"http://127.0.0.1:{port} (Ctrl-C ends it)\n", process.stderr.read()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=10) as answer:
            assert b"Depth attention" in answer.read()
        with socket.socket() as elsewhere, pytest.raises(OSError):
            elsewhere.settimeout(5)
            elsewhere.connect(("127.0.0.2", port))
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, stdout, stderr) == (0, "", "")


@needs_gradio
def test_bad_input_is_one_line(tmp_path):
    assert "at most 2 models" in refusal("--load", "a", "b", "c")
    assert f"--load {tmp_path}: " in refusal("--load", tmp_path, "--port", free_port())
    assert "--port" in refusal("--load", tmp_path, "--port", 65536)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refusal("--load", tmp_path, "--port", port)
    assert f"--port {port}: cannot be listened at (Address already in use)" in message
    assert "--host no.such.host" in refusal("--load", tmp_path, "--host", "no.such.host")


def test_without_gradio_it_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert "pip install 'megatron_attnres[app]'" in refusal("--load", tmp_path)
