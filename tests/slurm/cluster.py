"""A real Slurm on this machine: munged, slurmctld and four slurmd, from a folder of their own.

Needs root and Debian's packages slurm-wlm and munge. Everything is stopped and removed at the end.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import psutil

from tests.training.command import HIDDEN_VARIABLES

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
NODES = ("n1", "n2", "n3", "n4")
START_SECONDS = 30.0

# Signals, lost nodes and jobs whose time has come again are noticed in seconds here, on a cluster
# in minutes.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CryptoType=crypto/munge
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=15
KillWait=10
MessageTimeout=10
PropagateResourceLimits=NONE
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def why_not() -> str | None:
    """What this machine lacks for a Slurm of its own; None if it has all."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"a real Slurm needs Debian's slurm-wlm and munge; {', '.join(missing)} not found"
    if os.geteuid() != 0:
        return "a real Slurm needs root, to start its daemons"
    return None


@dataclass
class SlurmCluster:
    """Four nodes of this machine, n1 to n4.

    Attributes:
        folder: of configuration, state and logs.
        daemons: by name; a node's daemon carries the node's name.
    """

    folder: Path
    daemons: dict[str, subprocess.Popen] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """What Slurm's commands need to find this cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def submit(
        self,
        script: Path | str,
        *arguments: str,
        options: tuple[str, ...] = (),
        **environment: str,
    ) -> int:
        """The id of a new job."""
        command = ("sbatch", "--parsable", *options, str(script), *arguments)
        return int(self.command(*command, **environment).strip().split(";")[0])

    def command(self, *arguments: str, check: bool = True, **environment: str) -> str:
        """Run one of Slurm's commands; its output."""
        done = subprocess.run(
            arguments,
            env=clean_environment() | self.environment | environment,
            capture_output=True,
            text=True,
            timeout=30,
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(arguments)}: {done.stderr}")
        return done.stdout

    def job(self, job_id: int) -> dict[str, str]:
        """What the controller says of a job, by field."""
        text = self.command("scontrol", "--oneliner", "show", "job", str(job_id))
        pairs = (word.partition("=") for word in text.split())
        return {name: value for name, equals, value in pairs if equals}

    def state(self, job_id: int) -> str:
        """A job's state. One that was requeued starts in seconds, not after Slurm's two minutes.

        At once it may not: Slurm has just declared its credential of that second invalid.
        """
        job = self.job(job_id)
        if job["JobState"] == "PENDING" and job.get("Reason") == "BeginTime":
            begin = datetime.fromisoformat(job["EligibleTime"])
            if begin - datetime.now() > timedelta(seconds=10):
                self.command(
                    "scontrol", "update", f"JobId={job_id}", "StartTime=now+3seconds", check=False
                )
        return job["JobState"]

    def start_node(self, node: str) -> None:
        """Start a node's daemon."""
        self._start(node, "slurmd", "-D", "-N", node)
        _until(lambda: self._is_up(node), f"node {node} to be up")

    def kill_node(self, node: str) -> None:
        """All processes of a node at once, as when its power fails: daemon, steps, tasks."""
        daemon = self.daemons.pop(node)
        tasks = self._processes_with("SLURMD_NODENAME", node)
        steps = {parent for task in tasks for parent in _parents(task) if _is_step(parent)}
        for process in (psutil.Process(daemon.pid), *steps, *tasks):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        daemon.wait(timeout=10)

    def ranks_of(self, job_id: int) -> dict[int, psutil.Process]:
        """Processes of a job's ranks that train, by global rank."""
        found = {}
        for process in self._processes_with("SLURM_JOB_ID", str(job_id)):
            with suppress(psutil.NoSuchProcess):
                if "pretrain_attnres.py" in process.cmdline() and "RANK" in process.environ():
                    found[int(process.environ()["RANK"])] = process
        return found

    def _processes_with(self, name: str, value: str) -> list[psutil.Process]:
        """Those of this cluster whose environment has this."""
        wanted = self.environment | {name: value}
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                environment = process.environ()
                if all(environment.get(one) == wanted[one] for one in wanted):
                    found.append(process)
        return found

    def _start(self, name: str, *command: str) -> None:
        log = (self.folder / f"{name}.out").open("a")
        self.daemons[name] = subprocess.Popen(
            command,
            env=clean_environment() | self.environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _is_up(self, node: str) -> bool:
        text = self.command("sinfo", "--noheader", f"--nodes={node}", "--format=%T", check=False)
        return text.split()[:1] in (["idle"], ["mixed"], ["allocated"])


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """A cluster whose nodes are up."""
    cluster = SlurmCluster(folder)
    try:
        _start_munge(cluster)
        (folder / "slurm.conf").write_text(_configuration(folder))
        (folder / "state").mkdir()
        for node in NODES:
            (folder / f"spool-{node}").mkdir()
        cluster._start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            cluster.start_node(node)
        yield cluster
    finally:
        _stop(cluster)


def clean_environment() -> dict[str, str]:
    """This process's environment without what a launcher, Slurm or pytest put there."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in HIDDEN_VARIABLES and not name.startswith("SLURM")
    }


def _configuration(folder: Path) -> str:
    host = socket.gethostname().split(".")[0]
    controller_port, *ports = _free_ports(1 + len(NODES))
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 State=UNKNOWN"
        for node, port in zip(NODES, ports, strict=True)
    )
    return CONFIGURATION.format(
        host=host, port=controller_port, folder=folder, nodes=nodes
    ).lstrip()


def _start_munge(cluster: SlurmCluster) -> None:
    """A munged of our own, with a key of its own, beside one that may run already."""
    folder = cluster.folder / "munge"
    folder.mkdir(mode=0o755)
    key = folder / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    cluster._start(
        "munged",
        "munged",
        "--foreground",
        "--force",
        f"--socket={folder}/socket",
        f"--key-file={key}",
        f"--pid-file={folder}/pid",
        f"--log-file={folder}/log",
        f"--seed-file={folder}/seed",
    )
    _until(lambda: (folder / "socket").exists(), "munged")


def _stop(cluster: SlurmCluster) -> None:
    """Kill what the daemons started, then the daemons, the one that certifies last."""
    for process in cluster._processes_with("SLURM_CONF", cluster.environment["SLURM_CONF"]):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    for daemon in cluster.daemons.values():
        daemon.kill()
        daemon.wait(timeout=10)


def _parents(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return process.parents()
    return []


def _is_step(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.name().startswith("slurmstepd")
    return False


def _until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {START_SECONDS:.0f} s for {what}")
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
