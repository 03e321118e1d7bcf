"""Run one node's workers with torch elastic and record how each one ended.

The nodes meet in a store that node 0 hosts on one address: the loopback if there is only one node. elastic's default rendezvous
(c10d) is not used, because it unpickles what it reads from a store that listens on every interface: anyone who can reach that
port can run code here. This agent and its workers read only JSON and plain text from the store.
"""

import signal
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from paceline.dist.store import host_store, os_error_text
from paceline.errors import PacelineError


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the nodes of a run meet."""

    host: str
    port: int
    node: int
    nodes: int
    timeout_s: float


@dataclass(frozen=True)
class Exits:
    """How a node's workers ended."""

    codes: dict[int, int]
    """Exit code by rank; the negative signal number if a signal killed the worker."""
    terminated: frozenset[int]
    """Workers that were ended because another one failed."""


def run_workers(command: Sequence[str], workers: int, meeting: Meeting, logs: Path, kill_after_s: int) -> Exits:
    """Run `command` once per worker until all have ended. If one fails, end the others."""
    spec = WorkerSpec(
        role="worker",
        local_world_size=workers,
        rdzv_handler=_Rendezvous(meeting),
        entrypoint=command[0],
        args=tuple(command[1:]),
        max_restarts=0,
        monitor_interval=0.1,
    )
    agent = _Agent(spec, DefaultLogsSpecs(log_dir=str(logs)))
    agent.kill_after_s = kill_after_s
    try:
        agent.run()
        return agent.exits()
    finally:
        if meeting.nodes == 1:  # other nodes may still need the store
            # The agent is part of a reference cycle: its store would listen at a port until the next garbage collection.
            agent._pcontext = agent._store = agent._worker_group.store = None


class _Agent(LocalElasticAgent):
    """elastic's agent, extended to tell workers that exited on their own from workers that it ended."""

    kill_after_s = 30

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started: dict[int, Any] = super()._start_workers(worker_group)
        self._before: dict[int, int] | None = None
        self._closing_s = 0.0
        context: Any = self._pcontext
        close = context.close

        def close_after_reading_exits(death_sig: Any = None, timeout: int = 30) -> None:
            if self._before is None:
                self._before = self._ended()
            begin = time.monotonic()
            close(death_sig, self.kill_after_s)  # elastic ignores its own setting for this timeout when a worker fails
            self._closing_s += time.monotonic() - begin

        context.close = close_after_reading_exits
        return started

    def exits(self) -> Exits:
        codes = self._ended()
        late = codes.keys() - (self._before or {}).keys()
        if self._closing_s < self.kill_after_s:
            # Too soon for a SIGKILL of elastic's: something else killed the worker, and its process took a while to end.
            late = {rank for rank in late if codes[rank] != -signal.SIGKILL}
        return Exits(codes, frozenset(late))

    def _ended(self) -> dict[int, int]:
        context: Any = self._pcontext
        codes = {int(context.envs[i]["RANK"]): handler.proc.poll() for i, handler in context.subprocess_handlers.items()}
        return {rank: code for rank, code in codes.items() if code is not None}


class _Rendezvous(RendezvousHandler):
    """The nodes are known from the start, so all they need is a store. Their workers use it too."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._run_id = uuid.uuid4().hex if meeting.nodes == 1 else "paceline"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        here, timeout = self._meeting, timedelta(seconds=self._meeting.timeout_s)
        if here.node == 0:
            try:
                store = host_store(here.host, here.port, here.nodes, timeout)
            except OSError as error:
                where = f"{here.host}:{here.port}"
                raise PacelineError(
                    f"node 0 cannot listen at {where}: {os_error_text(error)}; choose another --rendezvous"
                ) from error
        else:
            store = TCPStore(here.host, here.port, here.nodes, is_master=False, timeout=timeout)
        info = RendezvousStoreInfo(here.host, store.port)
        return RendezvousInfo(PrefixStore(self._run_id, store), here.node, here.nodes, info)

    def get_backend(self) -> str:
        return "paceline"

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True
