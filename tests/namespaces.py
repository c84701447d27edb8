"""Ranks that meet over a slow network: each in a network namespace, with a share of the CPU.

A script wraps its jobs in ``throttled_network``. Its process moves into a fresh namespace that
plays the switch, every rank into one of its own, and a veth pair per rank is the cable, limited at
both ends as a full-duplex network card is. Namespaces have no names: when the processes are gone,
however they ended, the kernel takes them away. Only control groups stay behind a killed script;
they carry its process id and the next script removes them.
"""

import contextlib
import ctypes
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET

_PATIENCE = 60.0
_PACKET = 9000
# Tokens for two packets: one is sent at once, one makes up for a timer that fires late.
_BURST = 2 * (_PACKET + 14)
# What a connection has under way at most; the kernel gives half of it to the data.
_WINDOW = 128 << 10
# Nothing is ever dropped: TCP's own limits on unsent data are far below.
_QUEUE = 64 << 20
# Quotas are looked at when the scheduler runs, at the kernel's tick (4 ms) on a busy core. A
# process that wakes up more often makes it run.
_BEAT = 0.0005

_CGROUPS = Path("/sys/fs/cgroup")
_CGROUP_PREFIX = "attnres"
_PROBE = """
ip link add name switch type bridge &&
ip link add name probe type veth peer name other &&
tc qdisc add dev probe root tbf rate 1mbit burst 10000 limit 100000
"""


def why_not() -> str | None:
    """What this machine lacks for a throttled network and the way out; None if nothing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root: run this as root"
    for tool, package in {
        "ip": "iproute2",
        "tc": "iproute2",
        "nsenter": "util-linux",
        "unshare": "util-linux",
    }.items():
        if shutil.which(tool) is None:
            return f"the command {tool} is missing: install {package}"
    probe = subprocess.run(
        ["unshare", "--net", "sh", "-c", _PROBE], capture_output=True, text=True, timeout=_PATIENCE
    )
    if probe.returncode != 0:
        said = " ".join(probe.stderr.split())
        return (
            "the kernel refuses a network namespace with bridge, veth and tbf "
            f"({said}): use a kernel that has them, in a container one with --privileged"
        )
    try:
        _make_cgroup(f"{_CGROUP_PREFIX}-{os.getpid()}-probe", 1.0).rmdir()
    except OSError as error:
        return (
            f"no control group with a CPU quota can be made ({error}): mount the cpu controller "
            f"under {_CGROUPS}, in a container start it with --privileged --cgroupns host"
        )
    return None


def leftovers() -> list[Path]:
    """Control groups of scripts that are gone: what the next ``throttled_network`` removes."""
    return [
        folder
        for root in (_CGROUPS, _CGROUPS / "cpu")
        for folder in root.glob(f"{_CGROUP_PREFIX}-*-*")
        if not Path("/proc", folder.name.split("-")[1]).exists()
    ]


@dataclass(frozen=True)
class ThrottledNetwork:
    """Where the ranks of a job live; a RankHost. Goes to the ranks with their arguments.

    Attributes:
        store_address: of rank 0.
    """

    store_address: str
    _switch: int
    _bits_per_second: int
    _cgroups: tuple[Path, ...]
    _joined: tuple[Any, ...]
    _linked: tuple[Any, ...]

    def enter(self, rank: int) -> None:
        """In the rank's process: move it into its namespace and control group."""
        device = _device(rank)
        _check(_LIBC.unshare(_NEW_NETWORK))
        _set_protocol_options()
        os.environ["GLOO_SOCKET_IFNAME"] = device
        self._joined[rank].set()
        if not self._linked[rank].wait(_PATIENCE):
            raise TimeoutError(f"rank {rank} was not linked to the switch")
        self._linked[rank].clear()
        (self._cgroups[rank] / "cgroup.procs").write_text(str(os.getpid()))

    def attach(self, rank: int, pid: int) -> None:
        """In the script's process: link a rank's namespace to the switch."""
        if not self._joined[rank].wait(_PATIENCE):
            raise TimeoutError(f"rank {rank} did not enter its namespace")
        self._joined[rank].clear()
        device = _device(rank)
        # The link of an earlier job's rank disappears some time after its process.
        _ip(self._switch, [f"link delete {device}"], check=False)
        end = f"name {device} mtu {_PACKET} gso_max_segs 1"
        _ip(
            self._switch,
            [
                f"link add {end} type veth peer {end} netns {pid}",
                f"link set {device} master switch up",
            ],
        )
        _ip(
            pid,
            [
                "link set lo up",
                f"address add {_address(rank)}/24 dev {device}",
                f"link set {device} up",
            ],
        )
        for namespace in (self._switch, pid):
            _limit(namespace, "add", device, self._bits_per_second)
        self._linked[rank].set()

    def set_rate(self, bits_per_second: int) -> None:
        """In a rank's process: give its link another rate, both ways.

        Every rank of the job calls it; the network is as wished when all have.
        """
        for namespace in (self._switch, os.getpid()):
            _limit(namespace, "change", os.environ["GLOO_SOCKET_IFNAME"], bits_per_second)


@contextlib.contextmanager
def throttled_network(
    ranks: int, bits_per_second: int, cores_per_rank: float
) -> Iterator[ThrottledNetwork]:
    """A network for the jobs run inside: ``run_ranks(..., host=network)``. In the main thread.

    Args:
        ranks: most ranks of a job.
        bits_per_second: of every rank's link, each way, until ``set_rate``.
        cores_per_rank: CPU time per time that a rank gets at most, however many are busy. The sum
            over ranks should leave a tenth of a core to the rest.
    """
    for folder in leftovers():
        _remove_cgroup(folder)
    # There are no names in the network; torch would warn of that.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Outside, so that the namespaces go with the ranks and not with the fork server.
    forkserver.ensure_running()
    names = [f"{_CGROUP_PREFIX}-{os.getpid()}-rank{rank}" for rank in range(ranks)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_sigterm_as_exit())
        for core in os.sched_getaffinity(0):
            stack.enter_context(_metronome(core))
        cgroups = []
        for name in names:
            cgroups.append(_make_cgroup(name, cores_per_rank))
            stack.callback(_remove_cgroup, cgroups[-1])
        stack.enter_context(_own_namespace())
        switch = threading.get_native_id()
        _ip(switch, ["link set lo up", "link add name switch type bridge", "link set switch up"])
        yield ThrottledNetwork(
            _address(0),
            switch,
            bits_per_second,
            tuple(cgroups),
            tuple(_CONTEXT.Event() for _ in names),
            tuple(_CONTEXT.Event() for _ in names),
        )


def _device(rank: int) -> str:
    """A link's name, the same at both ends."""
    return f"rank{rank}"


def _address(rank: int) -> str:
    return f"10.0.0.{rank + 1}"


@contextlib.contextmanager
def _own_namespace() -> Iterator[None]:
    """Move this thread into a fresh network namespace and back."""
    outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _check(_LIBC.unshare(_NEW_NETWORK))
        try:
            _set_protocol_options()
            yield
        finally:
            _check(_LIBC.setns(outside, _NEW_NETWORK))
    finally:
        os.close(outside)


def _set_protocol_options() -> None:
    """TCP that fills a link at once and forgets nothing; of this namespace alone."""
    options = {
        "ipv6/conf/all/disable_ipv6": "1",
        "ipv6/conf/default/disable_ipv6": "1",
        # BBR, some machines' default, sends less now and then to measure the latency.
        "ipv4/tcp_congestion_control": "reno",
        "ipv4/tcp_slow_start_after_idle": "0",
        "ipv4/tcp_no_metrics_save": "1",
        # A message is handed over at once and goes on while its rank waits for CPU time.
        "ipv4/tcp_wmem": f"4096 {8 << 20} {8 << 20}",
        # No connection may fill the link's queue: those that share a link take turns.
        "ipv4/tcp_rmem": f"4096 {_WINDOW} {_WINDOW}",
    }
    for name, value in options.items():
        path = Path("/proc/sys/net") / name
        if path.exists():
            path.write_text(value)


def _ip(namespace: int, commands: Sequence[str], check: bool = True) -> None:
    _in_namespace(namespace, ["ip", "-batch", "-"], "\n".join(commands) + "\n", check)


def _limit(namespace: int, verb: str, device: str, bits_per_second: int) -> None:
    command = f"tc qdisc {verb} dev {device} root tbf rate {bits_per_second}bit"
    _in_namespace(namespace, [*command.split(), "burst", str(_BURST), "limit", str(_QUEUE)])


def _in_namespace(task: int, command: list[str], text: str = "", check: bool = True) -> None:
    """Run a command in the network namespace of a task."""
    done = subprocess.run(
        ["nsenter", f"--net=/proc/{task}/ns/net", *command],
        input=text,
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
    )
    if check and done.returncode != 0:
        raise OSError(f"{' '.join(command)} {text}failed: {done.stderr}")


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _make_cgroup(name: str, cores: float) -> Path:
    """A control group whose processes get so much CPU time per time, before all others."""
    # Of either version; the kernel takes no quota below 1 ms.
    first = (_CGROUPS / "cpu" / "cpu.cfs_quota_us").exists()
    root = _CGROUPS / "cpu" if first else _CGROUPS
    if not first:
        (root / "cgroup.subtree_control").write_text("+cpu")
    folder = root / name
    folder.mkdir()
    period = max(2000, math.ceil(1000 / cores))
    quota = max(1000, round(period * cores))
    limits = {"cpu.max": f"{quota} {period}", "cpu.weight": 10_000}
    if first:
        limits = {"cpu.cfs_period_us": period, "cpu.cfs_quota_us": quota, "cpu.shares": 1 << 18}
    try:
        for file, value in limits.items():
            (folder / file).write_text(str(value))
    except OSError:
        folder.rmdir()
        raise
    return folder


def _remove_cgroup(folder: Path) -> None:
    """Remove it as soon as its processes, which are ending, are gone."""
    deadline = time.monotonic() + 5
    while folder.exists():
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """SIGTERM leaves the context as Ctrl-C does."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _metronome(core: int) -> Iterator[None]:
    """A process that makes the scheduler of a core run every half millisecond."""
    command = [sys.executable, "-I", __file__, str(core), str(os.getpid())]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _beat(core: int, parent: int) -> None:
    """Runs in the metronome's process, until its parent is gone."""
    os.sched_setaffinity(0, {core})
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:  # some kernels give real-time priority to some control groups alone
        os.nice(-20)
    while os.getppid() == parent:
        time.sleep(_BEAT)


if __name__ == "__main__":
    _beat(int(sys.argv[1]), int(sys.argv[2]))
