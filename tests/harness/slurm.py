"""A Slurm cluster of two nodes on this machine: munged, slurmctld and two slurmd in one scratch folder, ended afterwards.

These are Slurm's real daemons, which detach from their parent, so they are tracked and ended by the pids in their pid files.
"""

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.engines import free_ports, wait_for
from harness.processes import alive, children, run

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo", "squeue", "scancel")
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # where Debian installs the daemons; it may not be in a user's PATH

_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=2
MinJobAge=60
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=2000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=2000
PartitionName=p Nodes=n1,n2 Default=YES OverSubscribe=NO
"""


@dataclass(frozen=True)
class Slurm:
    """A running cluster."""

    folder: Path

    @property
    def env(self) -> Mapping[str, str]:
        """The variables with which a command reaches this cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _PATH}

    def run(
        self, *command: str, env: Mapping[str, str] | None = None, timeout_s: float = 90
    ) -> subprocess.CompletedProcess[str]:
        """Run srun, sbatch, ... against this cluster."""
        return run(list(command), env={**self.env, **(env or {})}, timeout_s=timeout_s)

    def jobs(self) -> str:
        """The jobs that are waiting, running or completing."""
        return self.run("squeue", "--noheader", timeout_s=20).stdout.strip()

    def reason(self, job: str) -> str:
        """Why a job waits: `BeginTime` for one that was requeued."""
        return self.run("squeue", "--noheader", "--format=%r", f"--jobs={job}", timeout_s=20).stdout.strip()

    def tasks(self) -> dict[int, str]:
        """Processes that the nodes have started and that are still running."""
        pids = [_pid(self.folder / f"{node}.pid") for node in ("n1", "n2")]
        return {child: command for pid in pids if pid is not None for child, command in children(pid).items()}

    def logs(self) -> str:
        """The last lines of the daemons' logs, for a failing test."""
        tails = [
            f"--- {log.name}\n" + "\n".join(log.read_text().splitlines()[-15:]) for log in sorted(self.folder.glob("*.log"))
        ]
        return "\n".join(tails)


def missing() -> list[str]:
    """What this machine lacks to run a cluster."""
    return [program for program in PROGRAMS if shutil.which(program, path=_PATH) is None]


@contextmanager
def cluster(folder: Path) -> Iterator[Slurm]:
    """Start a cluster in a folder with a short path (a socket's path has at most 107 bytes), and always end it."""
    slurm = Slurm(folder)
    for name in ("state", "n1", "n2"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    (folder / "slurm.conf").write_text(
        _CONF.format(user=_user(), host=socket.gethostname(), folder=folder, ports=free_ports(3))
    )
    files = {
        "key-file": key,
        "socket": folder / "munge.sock",
        "pid-file": folder / "munged.pid",
        "seed-file": folder / "munge.seed",
    }
    munge_flags = [f"--{flag}={path}" for flag, path in files.items()] + [f"--log-file={folder}/munged.log", "--force"]
    try:
        for command in (["munged", *munge_flags], ["slurmctld", "-c"], ["slurmd", "-N", "n1"], ["slurmd", "-N", "n2"]):
            done = slurm.run(*command, timeout_s=30)
            assert done.returncode == 0, f"{command} failed: {done.stderr}\n{slurm.logs()}"
        wait_for(lambda: _idle_nodes(slurm) == 2, 30, lambda: f"the nodes are not idle\n{slurm.logs()}")
        yield slurm
    finally:
        _shut_down(slurm)


def _user() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name


def _idle_nodes(slurm: Slurm) -> int:
    return slurm.run("sinfo", "--noheader", "--Node", "--states=idle", timeout_s=20).stdout.count(" idle")


def _shut_down(slurm: Slurm) -> None:
    """End the jobs, then the daemons in reverse order of their start, each by its own pid; then check that none is left."""
    pids = [_pid(slurm.folder / f"{name}.pid") for name in ("n1", "n2", "slurmctld", "munged")]
    ours = {pid: "daemon" for pid in pids if pid is not None}
    if pids[2] is not None:
        slurm.run("scancel", "--full", f"--user={_user()}", timeout_s=20)
    ours |= slurm.tasks()
    for pid in pids:
        if pid is not None:
            _end(pid)
    for pid in ours:  # slurmstepd and tasks that outlived their daemon
        if alive(pid):
            _end(pid)
    left = {pid: name for pid, name in ours.items() if alive(pid)}
    assert not left, f"the cluster left processes behind: {left}"


def _end(pid: int) -> None:
    for how, patience_s in ((signal.SIGTERM, 10), (signal.SIGKILL, 5)):
        try:
            os.kill(pid, how)
            wait_for(lambda: not alive(pid), patience_s, lambda: f"{pid} does not end")
        except ProcessLookupError:
            return
        except AssertionError:
            continue
        return


def _pid(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
