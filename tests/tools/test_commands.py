"""What every command says when it ends, and with which status."""

import signal

import pytest

from megatron_attnres.commands import CommandParser, run_command
from megatron_attnres.errors import InputError, JoinError, LostRankError


@pytest.fixture
def ended(capsys, monkeypatch):
    """Runs a main that raises; gives status and what is said."""
    monkeypatch.setattr("sys.argv", ["tools/some.py"])
    previous = signal.getsignal(signal.SIGTERM)

    def run(error):
        def main(args):
            raise error

        with pytest.raises(SystemExit) as caught:
            run_command(main)
        return caught.value.code, capsys.readouterr().err

    yield run
    signal.signal(signal.SIGTERM, previous)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (InputError("--x a\nb: no"), 2, "some.py: --x a\\nb: no\n"),
        (JoinError("not all came"), 1, "some.py: not all came\n"),
        (LostRankError("rank 1: gone"), 1, "some.py: rank 1: gone\n"),
        (KeyboardInterrupt(), 130, "some.py: interrupted, nothing written\n"),
    ],
)
def test_one_line_and_a_status(ended, error, status, said):
    assert ended(error) == (status, said)


@pytest.mark.parametrize("error", [InputError("no"), JoinError("no"), KeyboardInterrupt()])
def test_one_rank_of_a_host_speaks(ended, monkeypatch, error):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert ended(error)[1] == ""


def test_every_rank_says_that_others_are_lost(ended, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert ended(LostRankError("rank 1: gone")) == (1, "some.py: rank 1: gone\n")


def test_names_that_are_no_text_can_be_printed(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["tools/some.py"])
    previous = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as caught:
            run_command(lambda args: print("caf\udce9"))
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert caught.value.code == 0
    assert capsys.readouterr().out == "caf\\udce9\n"


def test_a_file_of_flags_holds_no_nul(tmp_path):
    path = tmp_path / "flags.yaml"
    path.write_text('save: "a\\0b"\n')
    parser = CommandParser("")
    parser.add_argument("--save")
    with pytest.raises(InputError, match=r"save is 'a\\x00b'"):
        parser.parse_args(["--config", str(path)])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--promt", "x"], "unrecognized arguments: --promt, like --prompt; see --help"),
        (["--promt=x"], "unrecognized arguments: --promt=x, like --prompt; see --help"),
        (["--promt=a b"], "unrecognized arguments: --promt=a b, like --prompt; see --help"),
        (["--zzz"], "unrecognized arguments: --zzz; see --help"),
        (["--seed", "1"], "the following arguments are required: --prompt; see --help"),
    ],
)
def test_a_misspelt_flag_is_named_before_one_that_is_missing(words, said):
    parser = CommandParser("")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--seed")
    with pytest.raises(InputError) as caught:
        parser.parse_args(words)
    assert str(caught.value) == said


@pytest.mark.parametrize("value", ["-- no flag", "--no-flag", "--no=flag at all"])
def test_a_value_may_look_like_a_flag(value):
    parser = CommandParser("")
    parser.add_argument("--prompt")
    assert parser.parse_args([f"--prompt={value}"]).prompt == value
    if " " in value:
        assert parser.parse_args(["--prompt", value]).prompt == value
