"""`paceline.Parts` in a loop of one's own: the same model on 1, 2 and 3 workers."""

import difflib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline
from harness.processes import run_workers
from harness.training import blobs, train_in
from paceline.dist.world import World
from paceline.training.weights import model_sha256

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def own_loop(world: World) -> str:
    return model_sha256(example("own_loop").train())


def plain_ddp(world: World) -> str:
    return model_sha256(example("plain_ddp").train())


def on_1_2_3(work: Callable[..., Any], *args: Any) -> list[Any]:
    """What every worker returned, for worlds of 1, 2 and 3."""
    return [result for workers in (1, 2, 3) for result in run_workers(work, workers, *args)]


def test_the_example_trains_the_same_bits_on_1_2_and_3_workers() -> None:
    """With batch norm and dropout. The plain script it came from does not."""
    hashes = on_1_2_3(own_loop)
    assert len(set(hashes)) == 1
    assert len({run_workers(plain_ddp, workers)[0] for workers in (1, 2)}) == 2


def test_the_example_changes_at_most_10_lines_of_the_plain_script() -> None:
    before, after = ((EXAMPLES / f"{name}.py").read_text().split('"""', 2)[2] for name in ("plain_ddp", "own_loop"))
    changed = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[:2] in ("- ", "+ ")]
    counts = {kind: sum(line[0] == kind and bool(line[1:].strip()) for line in changed) for kind in "+-"}
    assert max(counts.values()) <= 10, counts


class Noisy(Dataset[Any]):
    """Each sample is augmented by random numbers that torch and numpy would draw anyway."""

    def __len__(self) -> int:
        return 103

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((5,), float(index % 3)) + torch.randn(5), index % 3


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def with_loader(world: World, processes: int) -> tuple[str, list[float], dict[str, float]]:
    model = net()
    team = paceline.Parts(model, samples=103, global_batch=24, virtual_workers=6, reduce="exact", seed=3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader, losses = team.loader(Noisy(), num_workers=processes, persistent_workers=processes > 0), []
    for epoch in range(2):
        for step in team.epoch(epoch, loader):
            for part in step:
                points, labels = part.batch
                logits = model(points)
                correct = (logits.argmax(1) == labels).float()
                part.backward(F.cross_entropy(logits, labels), accuracy=correct)
            losses += [value.item() for value in step.reduce().values()]
            optimizer.step()
            optimizer.zero_grad()
    loader._iterator = None  # ends the loader's processes

    def score(samples: Tensor) -> dict[str, Tensor]:
        torch.rand(1)  # drawn in evaluation: keyed by the chunk
        return {"score": model(torch.randn(len(samples), 5))[:, 0], "number": samples}

    scores = team.evaluate(41, score, batch=10, epoch=1)
    return model_sha256(model), losses, scores


@pytest.mark.parametrize("processes", [0, 1])
def test_a_loader_and_evaluation_give_the_same_numbers_on_1_2_and_3_workers(processes: int) -> None:
    (_, losses, scores), *others = found = on_1_2_3(with_loader, processes)
    assert all(other == found[0] for other in others)
    assert scores["number"] == 20.0, "the mean of 0 to 40: every sample once"
    assert len(losses) == 2 * 2 * 5, "loss and accuracy of 5 steps in 2 epochs"


def resumed(world: World, folder: Path, stop: int) -> str:
    """Train two epochs of 5 steps; save after `stop` steps, or resume from there if there is a file."""
    model, data = net(), Noisy()
    team = paceline.Parts(model, samples=103, global_batch=24, virtual_workers=6, reduce="exact", seed=3, measure_noise=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    file, done = folder / "state.pt", 0
    if file.exists() and not stop:
        state = torch.load(file)
        model.load_state_dict(state["model"])
        team.load_state_dict(state["team"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["done"]
    for epoch in range(done // team.steps_per_epoch, 2):
        loader = team.loader(data)
        for step in team.epoch(epoch, loader, start=done % team.steps_per_epoch):
            for part in step:
                part.backward(F.cross_entropy(model(part.batch[0]), part.batch[1]))
            step.reduce()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == stop:
                state = {"team": team.state_dict(), "optimizer": optimizer.state_dict(), "done": done}
                if world.rank == 0:
                    torch.save({**state, "model": model.state_dict()}, file)
                world.barrier()
                return ""
    team.average_statistics()
    return f"{model_sha256(model)} {team.noise_scale}"


@pytest.mark.parametrize("stop", [3, 7])
def test_state_saved_on_2_workers_continues_on_3_as_if_uninterrupted(tmp_path: Path, stop: int) -> None:
    (whole,) = run_workers(resumed, 1, tmp_path / "none", 0)
    run_workers(resumed, 2, tmp_path, stop)
    assert run_workers(resumed, 3, tmp_path, 0) == [whole] * 3


def growing(world: World, folder: Path, stop: tuple[int, int] | None) -> tuple[str, list[int], list[float]]:
    """Two epochs of a growing batch. Save before step `stop` (epoch, step), or resume from there if there is a file."""
    model = net()
    team = paceline.Parts(
        model, samples=103, virtual_workers=6, reduce="exact", seed=3, batch_schedule="0:6 0.5:12 1.4:24", smallest_part=6
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x = torch.randn(103, 5, generator=torch.Generator().manual_seed(1))
    file, begin, parts, losses = folder / "state.pt", (0, 0), [], []
    if file.exists() and stop is None:
        state = torch.load(file)
        model.load_state_dict(state["model"])
        team.load_state_dict(state["team"])
        optimizer.load_state_dict(state["optimizer"])
        begin, parts, losses = state["stop"], state["parts"], state["losses"]
    for epoch in range(begin[0], 2):
        for number, step in enumerate(team.epoch(epoch, start=begin[1]), start=begin[1]):
            if (epoch, number) == stop:
                kept = {"team": team.state_dict(), "optimizer": optimizer.state_dict(), "parts": parts, "losses": losses}
                if world.rank == 0:
                    torch.save({**kept, "model": model.state_dict(), "stop": stop}, file)
                world.barrier()
                return "", [], []
            for part in step:
                part.backward(F.cross_entropy(model(x[part.samples]), part.samples % 3))
            losses.append(step.reduce()["loss"].item())
            parts.append(team.phase.parts)
            optimizer.step()
            optimizer.zero_grad()
        begin = (epoch + 1, 0)
    team.average_statistics()
    return model_sha256(model), parts, losses


def test_a_growing_batch_has_the_same_bits_on_1_2_and_3_workers_some_of_them_idle(tmp_path: Path) -> None:
    first, *others = on_1_2_3(growing, tmp_path, None)
    assert sorted(set(first[1])) == [1, 3, 6]
    assert others == [first] * 5


@pytest.mark.parametrize("stop", [(0, 3), (1, 5)])
def test_a_growing_batch_continues_on_3_workers_from_2(tmp_path: Path, stop: tuple[int, int]) -> None:
    (whole,) = run_workers(growing, 1, tmp_path / "none", None)
    run_workers(growing, 2, tmp_path, stop)
    assert run_workers(growing, 3, tmp_path, None) == [whole] * 3


def fast(world: World, at_once: int) -> list[float]:
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=torch.Generator().manual_seed(parameter.numel()))
    x = torch.randn(103, 5, generator=torch.Generator().manual_seed(1))
    team = paceline.Parts(model, samples=103, global_batch=24, virtual_workers=6, seed=3, at_once=at_once, accumulate=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in team.epoch(0):
        for part in step:
            part.backward(F.cross_entropy(model(x[part.samples]), part.samples % 3))
        step.reduce()
        optimizer.step()
        optimizer.zero_grad()
    team.average_statistics()
    return [value for tensor in model.state_dict().values() for value in tensor.double().flatten().tolist()]


def test_fast_mode_agrees_to_rounding_on_1_2_and_3_workers_together_or_in_turn() -> None:
    found = [*on_1_2_3(fast, 1), *on_1_2_3(fast, 2)]
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-4, abs=1e-5)


def by_hand(world: World) -> list[Any]:
    """The task of `product`, trained by a loop of one's own."""
    task = blobs(norm=True, dropout=0.5)
    data, model = task.train(), None
    trained = train_in(world, task, PRODUCT)
    from paceline.core.keys import key, seed_all
    from paceline.training.model import _INIT

    seed_all(key(0, _INIT))
    model = task.model()
    team = paceline.Parts(model, samples=103, global_batch=12, virtual_workers=3, reduce="exact", seed=0, world=world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        for step in team.epoch(epoch):
            for part in step:
                points, labels = (tensor[part.samples] for tensor in data.tensors[:2])
                part.backward(F.cross_entropy(model(points), labels, reduction="none"))
            step.reduce()
            optimizer.step()
            optimizer.zero_grad()
    team.average_statistics()
    return [trained.result.model_sha256, model_sha256(model)]


PRODUCT = {
    **{"virtual_workers": 3, "reduce": "exact", "optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "epochs": 2},
    **{"schedule": "constant", "lr_rule": "none", "fast": "off"},
}


def test_the_products_loop_and_ones_own_train_the_same_bits() -> None:
    """There is one path: `paceline train` is a client of the same core."""
    for product, own in run_workers(by_hand, 2):
        assert product == own


class Counted(nn.Module):
    """A buffer of a kind that gloo may not send, and one that is not saved; each worker starts with its own."""

    def __init__(self, rank: int, kind: torch.dtype) -> None:
        super().__init__()
        self.net = nn.Linear(5, 3)
        self.register_buffer("kind", torch.full((3,), rank, dtype=kind))
        self.register_buffer("scratch", torch.full((2,), float(rank)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def start(world: World, reduce: str) -> list[Any]:
    torch.manual_seed(world.rank)
    model = Counted(world.rank, torch.int16 if reduce == "exact" else torch.int64)  # DDP itself cannot send int16
    paceline.Parts(model, samples=8, global_batch=4, virtual_workers=2, reduce=reduce)  # type: ignore[arg-type]
    return [model.kind.tolist(), model.scratch.tolist(), model.net.weight.tolist()]  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("reduce", ["fast", "exact"])
def test_all_workers_start_from_rank_0_whatever_their_buffers_are(reduce: str) -> None:
    first, second = run_workers(start, 2, reduce)
    assert first == second
    assert first[:2] == [[0, 0, 0], [0.0, 0.0]]


def crowded(world: World) -> str:
    try:
        paceline.Parts(net(), samples=64, global_batch=16, virtual_workers=8, at_once=4, reduce="exact")
    except paceline.PacelineError as error:
        return str(error)
    return ""


def test_groups_for_all_workers() -> None:
    for said in run_workers(crowded, 3):
        assert "at_once is 4: the 8 parts then make too few groups for all workers" in said
