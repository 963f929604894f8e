"""A real Slurm of two nodes on this machine: its own munge, ports and folders, gone with the test."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.running import environment, send

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
SECONDS = 200
# Only the first node must have a name that resolves: it is where the processes of several nodes meet.
NODES = (socket.gethostname(), "zz-second")
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmdTimeout=10
MessageTimeout=5
KillWait=10
OverTimeLimit=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=2
NodeName={first} NodeHostname={host} NodeAddr=127.0.0.1 Port={port_1} CPUs=8 RealMemory=1000
NodeName={second} NodeHostname={host} NodeAddr=127.0.0.1 Port={port_2} CPUs=8 RealMemory=1000
PartitionName=normal Nodes=ALL Default=YES MaxTime=INFINITE State=UP GraceTime=20 PriorityTier=1 OverSubscribe=NO
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 OverSubscribe=NO
"""


def missing_programs() -> list[str]:
    return [program for program in PROGRAMS if shutil.which(program) is None]


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Start munge, a controller and two nodes, and end them all."""
    with ExitStack() as stack:
        stack.callback(_kill, lambda: _processes(folder))
        yield Cluster(folder, stack)


class Cluster:
    """The running daemons, and the commands of a user of theirs."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}
        (folder / "state").mkdir()
        self._write_configuration()
        self._start_munge()
        self._start("slurmctld", "-D", "-c")
        for node in NODES:
            self.start_node(node)
        self.wait_for(lambda: self.ask("sinfo", "-h", "-o", "%D %T").split() == ["2", "idle"])

    def _write_configuration(self) -> None:
        control, port_1, port_2 = _free_ports(3)
        text = _CONFIGURATION.format(
            host=socket.gethostname(),
            folder=self._folder,
            first=NODES[0],
            second=NODES[1],
            control=control,
            port_1=port_1,
            port_2=port_2,
        )
        (self._folder / "slurm.conf").write_text(text)

    def _start_munge(self) -> None:
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        options = [f"--{name}-file={self._folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
        self._start("munged", "--foreground", "--force", f"--socket={self._folder}/munge.socket", *options)
        self.wait_for(lambda: (self._folder / "munge.socket").exists())

    def _start(self, program: str, *words: str) -> subprocess.Popen[bytes]:
        log = self._stack.enter_context((self._folder / f"{program}.out").open("ab"))
        return subprocess.Popen(
            [program, *words], env=environment(self.variables), stdout=log, stderr=log, start_new_session=True
        )

    def start_node(self, node: str) -> None:
        (self._folder / f"spool_{node}").mkdir(exist_ok=True)
        self._nodes[node] = self._start("slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """Let a node die with everything that runs on it, as in a power cut."""
        _kill(lambda: [entry for entry in _processes(self._folder) if _is_on(node, entry)])
        self._nodes[node].wait(SECONDS)

    def ask(self, *words: str) -> str:
        done = subprocess.run(
            words, env=environment(self.variables), capture_output=True, text=True, timeout=SECONDS, check=False
        )
        return done.stdout.strip()

    def wait_for(self, condition: Callable[[], bool], seconds: float = SECONDS) -> None:
        limit = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < limit, self.told()
            time.sleep(0.2)

    def told(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(self._folder.glob("*.log")))


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def _processes(folder: Path) -> list[Path]:
    """Return all daemons and jobs of a cluster: they have its configuration in their environment."""
    mark = f"SLURM_CONF={folder}/slurm.conf".encode()
    return [entry for entry in Path("/proc").glob("[0-9]*") if mark in _environment(entry)]


def _environment(entry: Path) -> list[bytes]:
    try:
        return (entry / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _is_on(node: str, entry: Path) -> bool:
    """Return whether a process belongs to a node: a job knows its name, a daemon writes its log."""
    try:
        opened = [path.readlink().name for path in (entry / "fd").iterdir()]
    except OSError:
        opened = []
    return f"SLURMD_NODENAME={node}".encode() in _environment(entry) or f"slurmd_{node}.log" in opened


def _kill(find: Callable[[], list[Path]]) -> None:
    """Kill what is found until nothing is found; a zombie has no environment any more."""
    while found := find():
        for entry in found:
            send(int(entry.name), signal.SIGKILL)
        time.sleep(0.05)
