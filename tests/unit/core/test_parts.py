"""`paceline.Parts` on one worker; tests/ranks/test_own_loop.py has several."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.core.determinism import deterministic
from paceline.errors import UsageError
from paceline.phases import Phase

X = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(50) % 3


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Exact mode sets flags of the process."""
    with deterministic():
        yield


def parts(model: nn.Module | None = None, **options: Any) -> paceline.Parts:
    return paceline.Parts(model or nn.Linear(4, 3), **{"samples": 50, "global_batch": 12, "virtual_workers": 4, **options})


def losses(model: nn.Module, samples: Tensor) -> Tensor:
    return F.cross_entropy(model(X[samples]), Y[samples], reduction="none")


@pytest.mark.parametrize("options", [{}, {"reduce": "exact"}, {"accumulate": 2}, {"virtual_workers": 1}])
def test_an_epochs_gradients_are_those_of_its_samples(options: dict[str, Any]) -> None:
    model = nn.Linear(4, 3)
    seen = []
    for step in parts(model, **options).epoch(0):
        samples = []
        for part in step:
            samples += part.samples.tolist()
            part.backward(losses(model, part.samples), number=part.samples)
        metrics = step.reduce()
        assert len(samples) == step.samples
        expected = torch.autograd.grad(losses(model, torch.tensor(samples)).mean(), list(model.parameters()))
        for parameter, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, grad)
        assert metrics["loss"].item() == pytest.approx(losses(model, torch.tensor(samples)).mean().item(), rel=1e-5)
        assert metrics["number"].item() == pytest.approx(sum(samples) / len(samples), rel=1e-5)
        model.zero_grad()
        seen += samples
    assert sorted(seen) == list(range(50))


def test_steps_are_numbered_over_the_run() -> None:
    team = parts()
    assert [step.number for epoch in (0, 1) for step in team.epoch(epoch)] == list(range(2 * team.steps_per_epoch))
    assert [step.number for step in team.epoch(1, start=2)] == list(range(team.steps_per_epoch + 2, 2 * team.steps_per_epoch))


def test_each_part_is_seeded_by_step_and_part() -> None:
    def drawn(seed: int) -> list[float]:
        team, found = parts(seed=seed), []
        for step in team.epoch(0):
            for part in step:
                found.append(torch.rand(1).item())
                part.backward(losses(team.model, part.samples))
            step.reduce()
        return found

    first = drawn(0)
    assert len(set(first)) == len(first), "no two parts draw the same"
    assert drawn(1) != first
    assert drawn(0) == first


def test_every_part_has_batch_norm_statistics_of_its_own() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    team = parts(model, samples=12)
    means = []
    (step,) = team.epoch(0)
    for part in step:
        part.backward(losses(model, part.samples))
        means.append(0.1 * X[part.samples].mean(0))
        torch.testing.assert_close(model[0].running_mean, means[-1])
    step.reduce()
    team.average_statistics()
    torch.testing.assert_close(model[0].running_mean, torch.stack(means).mean(0))


def test_evaluation_uses_the_mean_statistics_and_leaves_the_model_training() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    team = parts(model, samples=48)
    for step in team.epoch(0):
        for part in step:
            part.backward(losses(model, part.samples))
        step.reduce()
        model.zero_grad()
    found = team.evaluate(50, lambda samples: {"loss": losses(model, samples)}, batch=7)
    assert model.training
    model.eval()
    assert found["loss"] == pytest.approx(losses(model, torch.arange(50)).mean().item(), rel=1e-5)


def test_the_noise_scale_is_measured() -> None:
    model = nn.Linear(4, 3)
    team = parts(model, measure_noise=True)
    for step in team.epoch(0):
        for part in step:
            part.backward(losses(model, part.samples))
        step.reduce()
        model.zero_grad()
    assert team.noise_scale > 0
    assert not math.isnan(team.noise_scale)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"reduce": "exakt"}, 'reduce is \'exakt\': it must be "fast" or "exact"'),
        ({"global_batch": 10}, "10 does not divide into 4 equal parts"),
        ({"samples": 3}, "3 training samples"),
        ({"at_once": 0}, "at_once, accumulate, global_batch and smallest_part must be at least 1"),
        ({"smallest_part": 0}, "at_once, accumulate, global_batch and smallest_part must be at least 1"),
        ({"at_once": 2, "model": nn.Sequential(nn.LazyBatchNorm1d(), nn.Linear(4, 3))}, "at_once is 2"),
        ({"reduce": "exact", "model": nn.Sequential(nn.Linear(4, 3), nn.SyncBatchNorm(3))}, "over all workers"),
    ],
)
def test_what_cannot_be_is_one_line(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as found:
        parts(**options)
    assert "\n" not in str(found.value)


def test_other_mistakes_are_one_line() -> None:
    team = parts()
    with pytest.raises(UsageError, match=r"Parts\.loader"):
        next(team.epoch(0, DataLoader(TensorDataset(X, Y))))
    with pytest.raises(UsageError, match="the dataset has 49 samples, and Parts was made for 50"):
        team.loader(TensorDataset(X[:49], Y[:49]))
    with pytest.raises(UsageError, match="start is 12: it must be how many of this epoch's 5 steps are done"):
        next(team.epoch(2, start=12))
    with pytest.raises(UsageError, match="measure_noise=True"):
        _ = team.noise_scale
    with pytest.raises(UsageError, match="other virtual_workers"):
        parts(virtual_workers=2).load_state_dict(team.state_dict())
    with pytest.raises(UsageError, match=r"evaluate returned 'loss' as a tensor of shape .10, 1."):
        team.evaluate(10, lambda samples: {"loss": losses(team.model, samples)[:, None]})
    numbers = iter(range(9))
    with pytest.raises(UsageError, match="report the same metrics in the same order"):
        team.evaluate(10, lambda samples: {f"m{next(numbers)}": losses(team.model, samples)}, batch=5)


def train(team: paceline.Parts, step: Any, **metrics: Tensor) -> None:
    for part in step:
        part.backward(losses(team.model, part.samples), **metrics)


def test_weights() -> None:
    team = parts()
    for step in team.epoch(0):
        for part in step:
            number = part.samples.float()
            part.backward(losses(team.model, part.samples), weight=number, number=number)
        samples = team.sampler.order(0)[slice(*team.sampler.cut(0).bounds[step.number : step.number + 2])].astype(float)
        found = step.reduce()
        assert set(found) == {"loss", "number"}
        assert float(found["number"]) == pytest.approx((samples**2).sum() / samples.sum(), rel=1e-5)
    found = team.evaluate(50, lambda i: {"number": i, "weight": i}, batch=7)
    assert found == {"number": pytest.approx(sum(i * i for i in range(50)) / sum(range(50)))}
    found = team.evaluate(50, lambda i: {"number": i.float().mean()}, batch=7)
    assert found == {"number": pytest.approx(24.5)}


def test_wrong_weights_are_one_line() -> None:
    team = parts()
    step = iter(next(team.epoch(0)))
    part = next(step)
    values = losses(team.model, part.samples)
    with pytest.raises(UsageError, match=r"part.backward got 'weight' as a float: it must be a tensor"):
        part.backward(values, weight=3.0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"part.backward got 'weight' as one number for the batch, and 'loss' with one value"):
        part.backward(values, weight=torch.tensor(3.0))
    part.backward(values, weight=torch.ones(len(values)))
    part = next(step)
    with pytest.raises(UsageError, match="one part reported loss, another loss, weight: report the same"):
        part.backward(losses(team.model, part.samples))
    with pytest.raises(UsageError, match="evaluate returned 'weight' as one number for the batch, and 'number' with"):
        team.evaluate(10, lambda i: {"number": i, "weight": i.sum()})


def test_parts_report_the_same_metrics() -> None:
    team = parts()
    step = iter(next(team.epoch(0)))
    part = next(step)
    part.backward(losses(team.model, part.samples), accuracy=torch.zeros(3))
    part = next(step)
    with pytest.raises(UsageError, match="one part reported loss, another loss, accuracy"):
        part.backward(losses(team.model, part.samples))
    with pytest.raises(UsageError, match="17 metrics: at most 16"):
        train(team, next(parts().epoch(0)), **{f"m{i}": torch.zeros(1) for i in range(16)})


def test_a_part_without_backward_and_a_second_reduce_are_refused() -> None:
    team = parts()
    step = next(team.epoch(0))
    for part in step:
        if part.item.parts[0] != 2:
            part.backward(losses(team.model, part.samples))
    with pytest.raises(UsageError, match="step 0: backward was called for 3 of this worker's 4 parts"):
        step.reduce()
    step.forget()
    step = next(team.epoch(0))
    train(team, step)
    step.reduce()
    with pytest.raises(UsageError, match="step 0 is reduced already"):
        step.reduce()


def test_backward_belongs_to_the_current_part() -> None:
    """A part kept for later would run with another part's statistics and random numbers."""
    team = parts()
    kept = list(next(team.epoch(0)))
    with pytest.raises(UsageError, match="inside `for part in step`"):
        kept[0].backward(losses(team.model, kept[0].samples))
    for part in next(team.epoch(0)):
        part.backward(losses(team.model, part.samples))
        with pytest.raises(UsageError, match="once per part"):
            part.backward(losses(team.model, part.samples))
        break


@pytest.mark.parametrize("reduce", ["fast", "exact"])
def test_a_step_that_was_not_reduced_is_noticed_and_can_be_forgotten(reduce: str) -> None:
    team = parts(reduce=reduce)
    first, second, third, *_ = team.steps(0, range(3))
    for part in first:
        part.backward(losses(team.model, part.samples))
        break
    with pytest.raises(UsageError, match="the last step was not reduced"):
        train(team, second)
    for part in second:
        part.backward(losses(team.model, part.samples))
        break
    second.forget()
    train(team, third)
    third.reduce()
    samples = torch.cat([torch.from_numpy(item.samples) for item in third.passes])
    expected = torch.autograd.grad(losses(team.model, samples).mean(), list(team.model.parameters()))
    for parameter, grad in zip(team.model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_gradients_of_the_step_before_do_not_count() -> None:
    """Without zero_grad, each worker would add them again."""
    found = []
    for clears in (True, False):
        torch.manual_seed(0)
        team = parts(reduce="exact")
        for step in list(team.epoch(0))[:2]:
            if clears:
                team.model.zero_grad()
            train(team, step)
            step.reduce()
        found.append(
            torch.cat([parameter.grad.flatten() for parameter in team.model.parameters() if parameter.grad is not None])
        )
    assert found[0].equal(found[1])


def test_a_skipped_step_does_not_shift_the_loaders_batches() -> None:
    team = parts()
    loader = team.loader(TensorDataset(X, torch.arange(50)))
    for step in team.epoch(0, loader):
        if step.number % 2 == 0:
            continue
        for part in step:
            assert part.batch[1].equal(part.samples)
            part.backward(losses(team.model, part.samples))
        step.reduce()


def test_an_unfrozen_layer_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    team = parts(model)
    next(team.epoch(0))
    model[0].requires_grad_(True)
    with pytest.raises(UsageError, match=r"0\.weight was frozen when Parts was made"):
        next(team.epoch(0))


def test_an_epoch_ends_with_the_mean_statistics_and_modes_stay() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model[1].eval()
    team = parts(model, samples=48)
    for step in team.epoch(0):
        train(team, step)
        step.reduce()
    rows, _ = team.statistics.gather(team.world)
    torch.testing.assert_close(model[0].running_mean.double(), rows.mean(0)[:4])
    team.evaluate(48, lambda samples: {"loss": losses(model, samples)})
    assert [module.training for module in model] == [True, False, True]


def test_an_automatic_schedule_is_refused_in_a_loop_of_ones_own():
    with pytest.raises(UsageError, match="batch_schedule='auto' is for paceline train"):
        paceline.Parts(nn.Linear(1, 1), samples=256, global_batch=64, virtual_workers=2, batch_schedule="auto")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"global_batch": 64, "batch_schedule": "0:64 1:256"},
            "the largest batch of batch_schedule is 256, but the global batch (global_batch, or the loader's batch_size) is 64:"
            " they must be equal",
        ),
        ({"batch_schedule": {0: 64, 1: "y"}}, "batch_schedule is '0:64 1:y': it must be epoch:batch pairs"),
        ({"batch_schedule": "auto:x"}, "batch_schedule is 'auto:x'"),
        ({"batch_schedule": "0:33 1:256"}, "batch_schedule: the global batch of 33"),
        ({"batch_schedule": "0:32 1:256", "stream": True}, "all phases of batch_schedule must have 2 parts: use smallest_part"),
        ({"batch_schedule": [Phase(0.5, 64, 2)]}, "the first phase starts at epoch 0.5: it must start at epoch 0"),
    ],
)
def test_errors_of_a_schedule_name_arguments_not_flags(options, told):
    smallest = {"smallest_part": 8} if "33" in told else {}
    with pytest.raises(UsageError) as error:
        paceline.Parts(nn.Linear(1, 1), samples=512, virtual_workers=2, **options, **smallest)
    assert told in str(error.value)
    assert "--" not in str(error.value)


def test_a_batch_schedule_as_a_dict_is_that_of_its_text():
    options = {"samples": 256, "virtual_workers": 2}
    made = [paceline.Parts(nn.Linear(1, 1), batch_schedule=given, **options) for given in ({0: 32, 1: 128}, "0:32 1:128")]
    assert made[0].sampler.phases == made[1].sampler.phases
    assert made[0].sampler.global_batch == 128
    for wrong in (5, [32, 64]):
        with pytest.raises(UsageError, match="batch_schedule is"):
            paceline.Parts(nn.Linear(1, 1), batch_schedule=wrong, **options)
