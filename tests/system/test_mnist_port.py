"""PyTorch's examples/mnist, ported: at most 12 changed lines, the same mathematics, and one hash on 1, 2 and 3 workers."""

import difflib
import importlib.util
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from harness.processes import run, run_workers
from harness.training import train_in
from paceline.dist.world import World
from paceline.training.tasks import resolve
from paceline.training.weights import model_sha256

MNIST = Path(__file__).parents[2] / "examples" / "mnist"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, MNIST / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def count_changed(before: str, after: str) -> tuple[int, int]:
    """Lines of the second text that are new or differ, and of the first that are gone or differ; no docstrings or blanks."""
    texts = [[line for line in text.split('"""', 2)[2].splitlines() if line.strip()] for text in (before, after)]
    diff = list(difflib.unified_diff(*texts, lineterm="", n=0))[2:]
    return sum(line[0] == "+" for line in diff), sum(line[0] == "-" for line in diff)


def test_the_port_changes_11_lines() -> None:
    added, removed = count_changed(*((MNIST / f"{name}.py").read_text() for name in ("plain", "own_loop")))
    assert max(added, removed) == 11, (added, removed)
    assert "with 11 changed lines" in (MNIST / "own_loop.py").read_text()


def test_the_page_counts_the_ports_with_accelerate_and_fabric_in_the_same_way() -> None:
    """They are counted here and not run: neither library is a dependency."""
    plain, page = (MNIST / "plain.py").read_text(), (MNIST.parents[1] / "docs" / "own-loop.md").read_text()
    lines = [max(count_changed(plain, (MNIST / f"with_{name}.py").read_text())) for name in ("accelerate", "fabric")]
    said = f"The same script needs {lines[0]} lines [with Accelerate](../examples/mnist/with_accelerate.py) and {lines[1]} ["
    assert said in " ".join(page.split())


def few(module: ModuleType, samples: int) -> None:
    """Let a script see only the first samples: every test takes seconds."""
    load_data = module.load_data

    def load_few(name: str) -> list[Any]:
        return [TensorDataset(*(tensor[:samples] for tensor in data.tensors)) for data in load_data(name)]

    module.load_data = load_few  # type: ignore[attr-defined]


ARGUMENTS = ["--epochs", "2", "--batch-size", "60", "--log-interval", "1", "--test-batch-size", "50"]


def port(world: World, reduce: str, folder: str) -> tuple[str, str]:
    import contextlib
    import io

    module = load("own_loop")
    few(module, 240)
    module.world = lambda: contextlib.nullcontext()
    module.main = module.main.__wrapped__  # the harness has joined a world already
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        model = module.main([*ARGUMENTS, "--reduce", reduce, "--save-model", f"{folder}/model.pt"])
    return model_sha256(model), written.getvalue()


def test_the_port_has_one_hash_and_one_log_on_1_2_and_3_workers(tmp_path: Path) -> None:
    found = [run_workers(port, workers, "exact", str(tmp_path)) for workers in (1, 2, 3)]
    assert len({hashed for workers in found for hashed, _ in workers}) == 1
    logs = [[said for _, said in workers] for workers in found]
    assert all(workers[1:] == [""] * (len(workers) - 1) for workers in logs), "only rank 0 prints"
    assert len({workers[0] for workers in logs}) == 1
    assert logs[0][0].count("Train Epoch: ") == 8
    assert logs[0][0].count("Test set: Average loss: ") == 2
    assert "/240 (" in logs[0][0]
    weights = torch.load(tmp_path / "model.pt")
    assert model_sha256(fill(weights)) == found[0][0][0]


def fill(weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    model = load("plain").Net()
    model.load_state_dict(weights)
    return model  # type: ignore[no-any-return]


class InOrder:
    """What plain.py's train() needs of a loader: the batches of `Parts`, which an epoch's seed decides."""

    def __init__(self, team: Any, data: TensorDataset, epoch: int) -> None:
        order, bounds = team.sampler.order(epoch), team.sampler.cut(epoch).bounds
        self.batches = [data[order[begin:end]] for begin, end in pairwise(bounds)]
        self.dataset = data

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


@pytest.mark.parametrize("reduce", ["fast", "exact"])
def test_plain_and_port_train_the_same_model_from_the_same_batches(reduce: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """They draw the order of samples and the dropout masks in different ways. With both equal, weights agree to rounding."""
    import paceline as library
    from paceline.core.determinism import deterministic

    trained, said = [], []
    with deterministic():
        for name in ("plain", "own_loop"):
            module = load(name)
            few(module, 250)
            args = module.parse([*ARGUMENTS])
            torch.manual_seed(args.seed)
            data, test_set = module.load_data(args.data)
            model = module.Net()
            model.dropout1.p = model.dropout2.p = 0.0
            loader = torch.utils.data.DataLoader(data, batch_size=60, shuffle=True)
            team = library.Parts(model, loader, virtual_workers=4, reduce=reduce, seed=args.seed)
            optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
            tested = torch.utils.data.DataLoader(test_set, batch_size=50)
            for epoch in (1, 2):
                if name == "plain":
                    module.train(args, model, torch.device("cpu"), InOrder(team, data, epoch), optimizer, epoch)
                    module.test(model, torch.device("cpu"), tested)
                else:
                    module.train(args, model, team, loader, optimizer, epoch)
                    module.test(model, torch.device("cpu"), team.deal(tested))
            trained.append(model.state_dict())
            said.append(capsys.readouterr().out.splitlines())
    for name, tensor in trained[0].items():
        torch.testing.assert_close(tensor, trained[1][name], rtol=1e-2, atol=2e-3)
    assert len(said[0]) == len(said[1]) > 10
    losses = [[float(line.split("Loss: ")[1]) for line in lines if "Loss: " in line] for lines in said]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


def test_plain_runs_as_it_is_and_the_port_under_torchrun(tmp_path: Path) -> None:
    done = run([sys.executable, str(MNIST / "plain.py"), "--epochs", "1", "--dry-run", "--save-model", str(tmp_path / "a.pt")])
    assert done.returncode == 0, done.stderr
    assert "Accuracy: " in done.stdout
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(MNIST / "own_loop.py")]
    done = run([*command, "--epochs", "1", "--dry-run", "--save-model", str(tmp_path / "b.pt")])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Train Epoch: ") == done.stdout.count("Accuracy: ") == 1
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["a.pt", "b.pt"]


def task(world: World) -> tuple[str, list[float], dict[str, float], str]:
    """The task on 240 images: three epochs of two steps."""
    made, _ = resolve(str(MNIST / "task.py"), {})
    small = replace(made, train=made.train.first(240), validation=made.validation.first(100))
    trained = train_in(world, small, {"epochs": 3, "global_batch": 120, "reference_batch": 120, "reduce": "exact"})
    rates = [row["lr"] for row in trained.watcher.steps]
    return trained.result.model_sha256, rates, trained.result.metrics, ", ".join(sorted(trained.optimizer))


def test_the_task_keeps_adadelta_and_steplr_and_has_one_hash() -> None:
    (found, *others) = [result for workers in (1, 2) for result in run_workers(task, workers)]
    assert all(other == found for other in others)
    _, rates, metrics, state = found
    assert rates == pytest.approx([1, 1, 0.7, 0.7, 0.49, 0.49])
    assert set(metrics) == {"loss", "accuracy"}
    assert "acc_delta" in state, "Adadelta's state"
