"""The libraries behind `--tracker`: one class each, all with the methods of `tracker.Library`.

Each follows its library's own environment variables. Without an account or a server, runs are stored on this machine.
"""

import importlib
import importlib.util
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from paceline.status import Status
from paceline.training.tracker import About, Library


class TensorBoard:
    """Event files in the record."""

    def __init__(self, about: About) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run repeats some steps: purge_step hides the old points from here on.
        repeated = about.resumed_at if any(about.folder.glob("events.out.tfevents.*")) else None
        self._has = -1 if repeated is None else repeated - 1
        self._writer: Any = SummaryWriter(str(about.folder), purge_step=repeated, flush_secs=10)
        self._writer.add_text("contract", about.contract)
        self.remembered: Mapping[str, Any] = {}

    def last_step(self, name: str) -> int | None:
        return self._has

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._writer.add_text("result", "\n".join(f"    {name}: {value}" for name, value in summary.items()))
        self._writer.close()


class Wandb:
    """W&B: it reads WANDB_PROJECT, WANDB_MODE and its other variables. Without an account, offline in the record."""

    def __init__(self, about: About) -> None:
        wandb = self._wandb = _import("wandb")
        self._ours = wandb.run is None
        offline = "WANDB_MODE" not in os.environ and not _has_wandb_account()
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or about.project,
            name=os.environ.get("WANDB_NAME") or about.name,
            id=about.known.get("id") or uuid.uuid4().hex[:12],
            resume="allow",
            reinit="create_new",
            dir=os.environ.get("WANDB_DIR") or str(about.folder),
            mode="offline" if offline else None,
            settings=wandb.Settings(console=os.environ.get("WANDB_CONSOLE", "off"), silent=True),
        )
        self._run.config.update(dict(about.params), allow_val_change=True)
        self.remembered: Mapping[str, Any] = {"id": self._run.id, "project": self._run.project}
        self._folder = Path(self._run.dir).parent
        if self._run.offline:
            why = ", because no account was found: wandb login, or set WANDB_API_KEY" if offline else ""
            about.say(f"W&B: the run is stored offline{why}; wandb sync {self._folder} uploads it")
        else:
            about.say(f"W&B: {self._run.url}")

    def last_step(self, name: str) -> int | None:
        """Offline, each start of a run has a folder of its own. The newest gets all rows, unless older ones were uploaded."""
        if not self._run.offline:
            return int(self._run.step) - 1
        return None if any(self._folder.parent.glob(f"*-{self._run.id}/*.synced")) else -1

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=max(step, self._run.step))

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))
        if summary["status"] == Status.INTERRUPTED and not self._run.sweep_id:  # a sweep would start the run again
            self._run.mark_preempting()  # W&B then shows a run that may go on, not a failed one
        self._run.finish(exit_code=0 if Status(summary["status"]).good else 1)
        if self._ours and self._wandb.run is None:
            self._wandb.teardown()  # ends the library's own process


def _has_wandb_account() -> bool:
    """Whether W&B would find an API key without asking for one."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    for name in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        with suppress(OSError, NetrcParseError):
            if name and netrc(os.path.expanduser(name)).authenticators(host):
                return True
    return False


class Mlflow:
    """MLflow: it reads MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME. Without them, the library's own local store."""

    def __init__(self, about: About) -> None:
        uri = None
        if "MLFLOW_TRACKING_URI" not in os.environ and importlib.util.find_spec("sqlalchemy") is None:
            # The default is a database, which mlflow-skinny does not have. It writes files only if it is told that it may.
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
            uri = Path("mlruns").resolve().as_uri()
            about.say("MLflow: the run is stored in mlruns; set MLFLOW_TRACKING_URI to send it to a server")
        entities = _import("mlflow.entities")
        self._metric = entities.Metric
        self._client = _import("mlflow.tracking").MlflowClient(tracking_uri=uri)
        run = self._client.get_run(about.known["run_id"]) if about.known.get("run_id") else None
        if run is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or about.project
            found = self._client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else self._client.create_experiment(name)
            run = self._client.create_run(experiment, run_name=os.environ.get("MLFLOW_RUN_NAME") or about.name)
        else:
            self._client.update_run(run.info.run_id, status="RUNNING")
        self._id = run.info.run_id
        self.remembered: Mapping[str, Any] = {"run_id": self._id}
        # A param cannot change: a resumed run keeps those that it started with.
        params = [entities.Param(name, str(value)) for name, value in about.params.items() if name not in run.data.params]
        for some in _in_groups(params, 100):  # the most that a server takes
            self._client.log_batch(self._id, params=some)
        self._client.set_tag(self._id, "record", str(about.folder.resolve()))

    def last_step(self, name: str) -> int | None:
        return max((metric.step for metric in self._client.get_metric_history(self._id, name)), default=-1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        self._client.log_batch(self._id, metrics=[self._metric(name, float(v), now, step) for name, v in values.items()])

    def finish(self, summary: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in summary.items() if name.startswith(("final/", "best/"))}
        if numbers:
            self.log(numbers, int(summary["steps"]))
        for name, value in summary.items():
            if name not in numbers:
                self._client.set_tag(self._id, name, str(value))
        status = Status(summary["status"])
        ended = "FINISHED" if status.good else "KILLED" if status is Status.INTERRUPTED else "FAILED"
        self._client.set_terminated(self._id, ended)


class Trackio:
    """trackio: it reads TRACKIO_DIR, TRACKIO_SPACE_ID and its other variables. Without them, its local database."""

    def __init__(self, about: About) -> None:
        trackio = _import("trackio")
        self._project = str(about.known.get("project") or os.environ.get("TRACKIO_PROJECT") or about.project)
        # trackio continues a run by its name, and records in different folders can have the same one.
        name = str(about.known.get("name") or f"{about.name}-{uuid.uuid4().hex[:6]}")
        resume = "allow" if about.known else "never"
        self._run: Any = trackio.init(project=self._project, name=name, resume=resume, config=dict(about.params), embed=False)
        self.remembered: Mapping[str, Any] = {"project": self._project, "name": name}

    def last_step(self, name: str) -> int | None:
        if os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL"):
            return None
        try:
            rows = _import("trackio.sqlite_storage").SQLiteStorage.get_logs(self._project, str(self._run.name))
        except Exception:  # not a public part of the library
            return None
        return max((int(row["step"]) for row in rows if name in row), default=-1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in summary.items() if name.startswith(("final/", "best/"))}
        if numbers:
            self.log(numbers, int(summary["steps"]))
        self._run.finish()


LIBRARIES: Mapping[str, Callable[[About], Library]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": Mlflow,
    "trackio": Trackio,
}


def _in_groups(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _import(name: str) -> Any:
    """An optional library: its types may not be there either."""
    return importlib.import_module(name)
