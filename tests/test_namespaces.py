"""Ranks on a throttled network get what they should, and nothing of it stays behind."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.namespaces import leftovers, why_not
from tests.namespaces_job import BITS_PER_SECOND, CORES_PER_RANK

ROOT = Path(__file__).resolve().parent.parent
MISSING = why_not()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")


def start(what: str) -> subprocess.Popen:
    """A script in a process of its own: this one must stay where it is."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.namespaces_job", what],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def namespaces_in_use() -> set[int]:
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(link.stat().st_ino)
        except OSError:  # a process that has just ended
            continue
    return found


def assert_soon_gone(namespaces: set[int]) -> None:
    deadline = time.monotonic() + 10
    while namespaces & namespaces_in_use():
        assert time.monotonic() < deadline, "a process is still in one of the script's namespaces"
        time.sleep(0.1)
    assert not [name for _, name in socket.if_nameindex() if name.startswith(("rank", "switch"))]


def leftovers_of(script: subprocess.Popen) -> list[Path]:
    return [folder for folder in leftovers() if f"-{script.pid}-" in folder.name]


def test_links_have_their_rate_and_ranks_their_share_of_the_cpu():
    script = start("measure")
    try:
        out, err = script.communicate(timeout=90)
    finally:
        script.kill()
    assert script.returncode == 0, err
    switch, ranks = map(json.loads, out.splitlines())
    # The sender's clock runs until the receiver's answer is there.
    assert ranks[0]["rate"] == pytest.approx(BITS_PER_SECOND, rel=0.1)
    assert ranks[0]["slower"] == pytest.approx(BITS_PER_SECOND / 4, rel=0.1)
    for rank in ranks:
        assert rank["share"] == pytest.approx(CORES_PER_RANK, rel=0.15)
    assert_soon_gone({switch})
    assert not leftovers_of(script)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_behind_a_script_that_is_ended(number):
    script = start("wait")
    try:
        switch, ranks = (json.loads(script.stdout.readline()) for _ in range(2))
        namespaces = {switch, *ranks}
        assert len(namespaces) == 3
        assert namespaces <= namespaces_in_use()
        script.send_signal(number)
        script.wait(timeout=20)
    finally:
        script.kill()
    assert_soon_gone(namespaces)
    if number == signal.SIGKILL:
        assert len(leftovers_of(script)) == 2, "what only the next script can remove"
        start("nothing").communicate(timeout=30)
    assert not leftovers_of(script)
