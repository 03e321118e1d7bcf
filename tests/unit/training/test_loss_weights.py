"""Losses that are one number per batch, and weights: a step follows the mean over the whole step, however it is cut."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.tokens import MASK, X, Y, per_batch, per_sample, scalar_loss, squares, tokens
from harness.training import ALONE, blobs, train_in
from paceline.config import make_config
from paceline.core.carrier import PAYLOAD, WEIGHT
from paceline.core.engine import divide_by_weight, weigh
from paceline.errors import UsageError
from paceline.training.build import build
from paceline.training.meter import EpochMeans


def whole_batches(options: dict[str, Any]) -> tuple[dict[str, Any], list[float], float]:
    """The same training by plain torch on whole global batches: weights, the loss of each step, the loss of the whole set."""
    task = tokens(per_batch)
    run = build(task, make_config(dict(task.defaults), options), ALONE)
    optimizer, losses = torch.optim.SGD(run.model.parameters(), lr=0.1, momentum=0.9, nesterov=True), []
    for epoch in range(2):
        order, bounds = run.sampler.order(epoch), run.sampler.cut(epoch).bounds
        for number in range(run.sampler.cut(epoch).steps):
            samples = torch.from_numpy(order[bounds[number] : bounds[number + 1]])
            total, count = squares(run.model, (X[samples], Y[samples], MASK[samples]))
            optimizer.param_groups[0]["lr"] = run.update.schedule.lr(run.sampler.first_step(epoch) + number)
            optimizer.zero_grad()
            loss = total.sum() / count.sum()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    with torch.no_grad():
        total, count = squares(run.model, (X, Y, MASK))
    return dict(run.model.state_dict()), losses, float(total.sum() / count.sum())


@pytest.mark.parametrize("objective", [per_sample, per_batch, scalar_loss])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"virtual_workers": 4},
        {"virtual_workers": 2, "accumulate": 2},
        {"virtual_workers": 4, "reduce": "exact"},
    ],
)
def test_a_weighted_step_is_the_gradient_of_one_big_batch(objective: Any, options: dict[str, Any]) -> None:
    weights, losses, validation = whole_batches({"virtual_workers": options.get("virtual_workers", 1)})
    trained = train_in(ALONE, tokens(objective), options)
    for name, tensor in weights.items():
        assert trained.weights[name] == pytest.approx(tensor.numpy(), rel=1e-4, abs=1e-6)
    assert [row["loss"] for row in trained.watcher.steps] == pytest.approx(losses, rel=1e-4)
    assert trained.watcher.epochs[-1]["val_loss"] == pytest.approx(validation, rel=1e-5)


def test_epoch_means_are_weighted_too() -> None:
    """Each token counts once: the mean of `count` over tokens, not over steps or sequences."""
    row = train_in(ALONE, tokens(per_sample), {"epochs": 1, "virtual_workers": 2}).watcher.epochs[0]
    counts = MASK.sum(1).double()
    expected = float((counts * counts).sum() / counts.sum())
    assert row["train_count"] == pytest.approx(expected, rel=1e-6)
    assert row["val_count"] == pytest.approx(expected, rel=1e-12)
    assert "train_weight" not in row
    assert "val_weight" not in row
    means = EpochMeans()
    means.add({"loss": 0.0}, 0.0)
    assert means.read() == {"loss": 0.0}


def test_a_resumed_run_has_the_same_weighted_means(tmp_path: Path) -> None:
    options = {"reduce": "exact", "virtual_workers": 2, "epochs": 1, "checkpoint_every": "2"}
    whole = train_in(ALONE, tokens(per_sample), options)
    calls = iter(range(100))

    def dying(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        if next(calls) == 9:
            raise KeyError("killed")
        return per_sample(model, batch)

    with pytest.raises(KeyError, match="killed"):
        train_in(ALONE, tokens(dying), options, tmp_path)
    resumed = train_in(ALONE, tokens(per_sample), options, tmp_path, resumes=True)
    assert resumed.watcher.steps[0]["step"] > 1
    assert resumed.result.model_sha256 == whole.result.model_sha256
    assert resumed.watcher.epochs[0]["train_count"] == whole.watcher.epochs[0]["train_count"]


def test_a_loss_of_the_batch_counts_by_samples() -> None:
    """The tail of an epoch: its smaller parts count less, exactly as with one value per sample."""

    def mean(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        values = blobs().objective(model, batch)
        return {name: value.mean() for name, value in values.items()}

    for options in ({"virtual_workers": 4}, {"virtual_workers": 2, "accumulate": 3}, {"virtual_workers": 3, "reduce": "exact"}):
        one, other = (train_in(ALONE, blobs(objective=each), options) for each in (None, mean))
        assert other.watcher.epochs[-1]["train_loss"] == pytest.approx(one.watcher.epochs[-1]["train_loss"], rel=1e-5)
        assert other.result.metrics == pytest.approx(one.result.metrics, rel=1e-5)


def test_parts_run_in_turn_if_the_loss_is_one_number() -> None:
    """Together, one number would mix the parts, and what it is would depend on the number of workers."""
    config = make_config(dict(tokens(per_batch).defaults), {"virtual_workers": 4})
    assert build(tokens(per_batch), config, ALONE).contract.parts == "in turn: the loss is one number per batch"
    assert build(tokens(per_sample), config, ALONE).contract.parts == "together"
    mixed = lambda model, batch: {"loss": squares(model, batch)[0].mean()}  # noqa: E731
    notes = train_in(ALONE, tokens(mixed), {"virtual_workers": 4, "parts_at_once": 4, "epochs": 1}).watcher.notes
    assert any("the loss is one number for a batch of 4 parts" in note for note in notes)


def test_a_step_of_weight_zero_changes_nothing() -> None:
    for objective in (per_sample, per_batch):
        task = tokens(objective, torch.zeros_like(MASK), validation_objective=lambda model, batch: {"loss": batch[1].mean(1)})
        trained = train_in(ALONE, task, {"virtual_workers": 2, "epochs": 1, "momentum": 0.0})
        untouched = build(task, make_config(dict(task.defaults), {}), ALONE).model.state_dict()
        assert all((trained.weights[name] == tensor.numpy()).all() for name, tensor in untouched.items())
        assert {row["loss"] for row in trained.watcher.steps} == {0.0}


def test_sam_climbs_by_the_weighted_loss() -> None:
    options = {"virtual_workers": 2, "sam_rho": 0.1}
    one, other = (train_in(ALONE, tokens(each), options) for each in (per_sample, per_batch))
    assert one.weights["weight"] == pytest.approx(other.weights["weight"], rel=1e-4)
    assert one.weights["weight"] != pytest.approx(whole_batches({})[0]["weight"].numpy(), rel=1e-4)


def test_local_steps_divide_by_the_weight_of_the_part() -> None:
    """Two parts that train by themselves for one step each: the mean of two runs, each on one half of the batch."""
    options = {"virtual_workers": 2, "accumulate": 2, "local_steps": 1, "local_after": 0.0, "max_steps": 1, "momentum": 0.0}
    task = tokens(per_batch)
    run = build(task, make_config(dict(task.defaults), options), ALONE)
    first = run.sampler.order(0)[:8]
    ends, losses, counts, start = [], [], [], {name: p.detach().clone() for name, p in run.model.named_parameters()}
    for part in range(2):
        run.model.load_state_dict(start)
        samples = torch.from_numpy(first[part * 4 : part * 4 + 4])
        total, count = squares(run.model, (X[samples], Y[samples], MASK[samples]))
        grads = torch.autograd.grad(total.sum() / count.sum(), list(run.model.parameters()))
        ends.append([p - run.update.schedule.lr(0) * grad for p, grad in zip(run.model.parameters(), grads, strict=True)])
        losses.append(float(total.detach().sum()))
        counts.append(int(count.sum()))
    for objective in (per_batch, per_sample):
        trained = train_in(ALONE, tokens(objective), options)
        for name, one, other in zip(start, *ends, strict=True):
            assert trained.weights[name] == pytest.approx(((one + other) / 2).detach().numpy(), rel=1e-5)
        assert trained.watcher.steps[0]["loss"] == pytest.approx(sum(losses) / sum(counts), rel=1e-5)


@pytest.mark.parametrize("options", [{"measure_noise": True}, {"lr_rule": "adascale"}])
def test_the_noise_scale_refuses_weights(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="compare the gradients of parts with equal weights: leave out 'weight'"):
        train_in(ALONE, tokens(per_sample), {"virtual_workers": 4, **options})


def test_a_weight_is_given_every_time_or_never() -> None:
    calls = iter(range(100))

    def sometimes(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        values = per_sample(model, batch)
        return values if next(calls) < 5 else {"loss": values["loss"], "count": values["count"]}

    with pytest.raises(UsageError, match="returned loss, count for one batch, and loss, count, weight for another"):
        train_in(ALONE, tokens(sometimes), {"virtual_workers": 2, "parts_at_once": 1})


def test_a_bad_weight_in_a_later_step_is_reported() -> None:
    calls = iter(range(100))

    def later(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        weight = batch[2].sum(1) + 1
        if next(calls) >= 6:
            weight[0] = -1  # the sum of the step's weights stays positive
        return {**per_sample(model, batch), "weight": weight}

    with pytest.raises(UsageError, match=r"a 'weight' in step \d+ that is negative or not finite"):
        train_in(ALONE, tokens(later), {})
    with pytest.raises(UsageError, match="'weight' of the validation data is negative or not finite"):
        train_in(
            ALONE, tokens(per_sample, validation_objective=lambda m, b: {**per_sample(m, b), "weight": -b[1].abs()[:, 0]}), {}
        )
    with pytest.raises(UsageError, match="every 'weight' of the validation data is 0"):
        train_in(
            ALONE, tokens(per_sample, validation_objective=lambda m, b: {**per_sample(m, b), "weight": 0 * b[1][:, 0]}), {}
        )


def test_values_of_weight_zero_do_not_count() -> None:
    loss = torch.tensor([1.0, torch.nan, 3.0], requires_grad=True)
    total, vector = weigh({"loss": loss}, ["loss"], torch.tensor([1, 0, 3]), 0.5, 3)
    total.backward()
    assert float(total.detach()) == pytest.approx((1 + 9) * 0.5 / 3)
    assert float(vector[WEIGHT]) == pytest.approx(4 * 0.5 / 3)
    assert loss.grad is not None
    assert loss.grad.tolist() == pytest.approx([0.5 / 3, 0.0, 1.5 / 3])


def test_gradients_of_several_types_are_divided() -> None:
    payload = torch.zeros(PAYLOAD)
    payload[0], payload[WEIGHT], payload[-1] = 6.0, 4.0, 1.0
    grads = [torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.bfloat16), None]
    out = divide_by_weight(payload, grads)
    assert [grad.tolist() for grad in grads if grad is not None] == [[0.25, 0.25]] * 3
    assert (float(out[0]), float(out[WEIGHT]), float(out[-1])) == (1.5, 4.0, 1.0)
