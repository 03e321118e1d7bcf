"""The norms against torch's own: part norm to one BatchNorm a part, sync norm to BatchNorm on all workers' samples at once."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.models.norms import PartNorm, SyncNorm, make_norm

CHANNELS = 3
SIDES = {1: (), 2: (4, 5)}


# --- part ---


@pytest.mark.parametrize(("dims", "channels_last"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize(("n", "part_size"), [(12, 4), (12, 12), (12, 100), (10, 4), (7, 3), (11, 2)])
def test_part_norm_is_one_batch_norm_a_part(n, part_size, dims, channels_last):
    # 11 by 2 without pixels: five parts of two and one of a single value.
    inputs, weights = _samples(n, dims), _samples(n, dims, seed=1)
    if channels_last:
        inputs = inputs.to(memory_format=torch.channels_last)
    layer = _noisy(PartNorm(CHANNELS, part_size))
    given = inputs.clone().requires_grad_()
    output = layer(given)
    (output * weights).sum().backward()

    parts = -(-n // part_size)
    alone = [_noisy(_batch_norm(dims)) for _ in range(parts)]
    for part, norm in enumerate(alone):
        samples = inputs[part::parts].clone().requires_grad_()
        if samples[:, 0].numel() == 1:
            norm.eval()
        expected = norm(samples)
        (expected * weights[part::parts]).sum().backward()
        torch.testing.assert_close(output[part::parts], expected)
        torch.testing.assert_close(given.grad[part::parts], samples.grad)
    torch.testing.assert_close(layer.weight.grad, sum(norm.weight.grad for norm in alone))
    torch.testing.assert_close(layer.bias.grad, sum(norm.bias.grad for norm in alone))
    trained = [norm for norm in alone if norm.training]
    torch.testing.assert_close(layer.running_mean, torch.stack([norm.running_mean for norm in trained]).mean(0))
    torch.testing.assert_close(layer.running_var, torch.stack([norm.running_var for norm in trained]).mean(0))
    assert layer.num_batches_tracked == 1


@pytest.mark.parametrize("n", [0, 1, 5])
def test_parts_of_a_single_value_take_the_running_statistics_and_leave_them(n):
    layer, before = _noisy(PartNorm(CHANNELS, 1)), _noisy(PartNorm(CHANNELS, 1)).state_dict()
    inputs = _samples(n, 1).requires_grad_()
    first = layer(inputs)
    torch.testing.assert_close(first, _noisy(_batch_norm(1)).eval()(inputs))
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    layer.part_size = 4
    layer(_samples(8, 1))  # moves the running statistics: the first pass must still know its own
    first.sum().backward()
    assert inputs.grad.isfinite().all()


@pytest.mark.parametrize("channels_last", [False, True])
def test_parts_of_one_sample_are_normalised_over_its_pixels(channels_last):
    inputs, weights = _samples(4, 2), _samples(4, 2, seed=1)
    if channels_last:
        inputs = inputs.to(memory_format=torch.channels_last)
    given = inputs.clone().requires_grad_()
    output = _noisy(PartNorm(CHANNELS, 1))(given)
    (output * weights).sum().backward()
    for part in range(4):
        sample = inputs[part : part + 1].contiguous().requires_grad_()
        expected = _noisy(_batch_norm(2))(sample)
        (expected * weights[part]).sum().backward()
        torch.testing.assert_close(output[part : part + 1], expected)
        torch.testing.assert_close(given.grad[part : part + 1], sample.grad)


def test_part_norm_cumulative_average():
    layer, reference = PartNorm(CHANNELS, 8).double(), nn.BatchNorm2d(CHANNELS).double()
    layer.momentum = reference.momentum = None
    for _ in range(3):
        inputs = _samples(8, 2)
        layer(inputs)
        reference(inputs)
    torch.testing.assert_close(layer.running_var, reference.running_var)


@pytest.mark.parametrize("make", [lambda: PartNorm(CHANNELS, 2), lambda: SyncNorm(CHANNELS)])
def test_evaluation_is_batch_norm_and_checkpoints_are_exchanged(make):
    reference = _noisy(nn.BatchNorm2d(CHANNELS)).eval()
    layer = make().double().eval()
    assert list(layer.state_dict()) == list(reference.state_dict())
    layer.load_state_dict(reference.state_dict())
    inputs = _samples(6, 2)
    assert torch.equal(layer(inputs), reference(inputs))


def test_bfloat16_goes_through_part_norm():
    layer = PartNorm(CHANNELS, 3)
    for n in (6, 5):
        output = layer(_samples(n, 2).bfloat16())
        assert output.dtype == torch.bfloat16
        assert output.isfinite().all()
    assert layer.running_var.dtype == torch.float32


def test_part_size_is_positive():
    with pytest.raises(ValueError, match="part_size is 0, must be 1 or more"):
        PartNorm(CHANNELS, 0)


@pytest.mark.parametrize("make", [lambda: PartNorm(CHANNELS, 2), lambda: SyncNorm(CHANNELS)])
def test_input_needs_channels(make):
    with pytest.raises(ValueError, match="at least"):
        make().eval()(torch.zeros(CHANNELS))


# --- group, none ---


@pytest.mark.parametrize(
    ("channels", "dims", "groups"),
    [(64, 2, 32), (160, 2, 32), (16, 2, 16), (48, 2, 24), (7, 2, 7), (37, 2, 1), (256, 1, 32), (64, 1, 8), (5, 1, 1)],
)
def test_groups_divide_the_channels(channels, dims, groups):
    layer = make_norm("group", channels, dims=dims)
    assert layer.num_groups == groups
    assert layer(torch.randn(2, channels, *SIDES[dims])).abs().max() > 0.1


def test_none_is_identity():
    inputs = _samples(2, 2)
    assert make_norm("none", CHANNELS, dims=2)(inputs) is inputs


# --- sync ---


@pytest.mark.parametrize("dims", [1, 2])
def test_sync_norm_alone_is_batch_norm(dims):
    layer, reference = _noisy(SyncNorm(CHANNELS)), _noisy(_batch_norm(dims))
    inputs = _samples(6, dims)
    assert torch.equal(layer(inputs), reference(inputs))
    assert torch.equal(layer.running_var, reference.running_var)


@pytest.mark.parametrize("sizes", [(5, 3), (4, 1, 0)])
def test_sync_norm_is_batch_norm_on_everyones_samples(sizes, tmp_path, monkeypatch):
    # A spawned worker imports this file by name, from the root of the tests.
    monkeypatch.syspath_prepend(Path(__file__).parents[3])
    mp.spawn(_sync_worker, args=(sizes, tmp_path), nprocs=len(sizes))
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(len(sizes))]

    for dims in (1, 2):
        reference = _noisy(_batch_norm(dims))
        inputs, weights = _samples(sum(sizes), dims).requires_grad_(), _samples(sum(sizes), dims, seed=1)
        for _ in range(2):
            reference.zero_grad()
            inputs.grad = None
            output = reference(inputs)
            (output * weights).sum().backward()
        found = [result[dims] for result in results]
        torch.testing.assert_close(torch.cat([each["output"] for each in found]), output)
        torch.testing.assert_close(torch.cat([each["input_grad"] for each in found]), inputs.grad)
        torch.testing.assert_close(sum(each["weight_grad"] for each in found), reference.weight.grad)
        torch.testing.assert_close(sum(each["bias_grad"] for each in found), reference.bias.grad)
        for each in found:
            torch.testing.assert_close(each["state"], dict(reference.state_dict()))
            assert each["state"].keys() == found[0]["state"].keys()
            assert all(torch.equal(value, found[0]["state"][name]) for name, value in each["state"].items())  # to the bit

    # Far from zero in bfloat16: float32 statistics, and a variance that a difference of sums would have lost.
    everyone = (_samples(sum(sizes), 2) + 64).bfloat16()
    expected = nn.BatchNorm2d(CHANNELS)(everyone.float())
    for result, inputs in zip(results, expected.split(sizes), strict=True):
        assert result["bfloat16"].dtype == torch.bfloat16
        torch.testing.assert_close(result["bfloat16"].float(), inputs, atol=0.02, rtol=0.01)

    # One value in all the world: nothing to divide by zero, nothing moves.
    for result in results:
        assert result["single"].isfinite().all()
        assert torch.equal(result["single_var"], torch.ones(CHANNELS))

    # Under DDP all workers end with the mean over workers of the local gradients.
    mean = sum(result[2]["weight_grad"] for result in results) / len(sizes)
    for result in results:
        torch.testing.assert_close(result["ddp_weight_grad"], mean)


def _sync_worker(rank: int, sizes: tuple[int, ...], folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(sizes))
    result = {}
    for dims in (1, 2):
        layer = _noisy(SyncNorm(CHANNELS))
        inputs = _samples(sum(sizes), dims).split(sizes)[rank].clone().requires_grad_()
        weights = _samples(sum(sizes), dims, seed=1).split(sizes)[rank]
        for _ in range(2):
            layer.zero_grad()
            inputs.grad = None
            output = layer(inputs)
            (output * weights).sum().backward()
        result[dims] = {
            "output": output.detach(),
            "input_grad": inputs.grad,
            "weight_grad": layer.weight.grad,
            "bias_grad": layer.bias.grad,
            "state": dict(layer.state_dict()),
        }
    result["bfloat16"] = SyncNorm(CHANNELS)((_samples(sum(sizes), 2) + 64).bfloat16().split(sizes)[rank]).detach()

    single = SyncNorm(CHANNELS)
    result["single"] = single(torch.randn(1 if rank == 0 else 0, CHANNELS)).detach()
    result["single_var"] = single.running_var

    wrapped = DistributedDataParallel(_noisy(SyncNorm(CHANNELS)))
    inputs = _samples(sum(sizes), 2).split(sizes)[rank]
    (wrapped(inputs) * _samples(sum(sizes), 2, seed=1).split(sizes)[rank]).sum().backward()
    result["ddp_weight_grad"] = wrapped.module.weight.grad
    torch.save(result, folder / f"{rank}.pt")
    dist.destroy_process_group()


# --- what they are fed ---


def _batch_norm(dims: int) -> nn.Module:
    return nn.BatchNorm1d(CHANNELS) if dims == 1 else nn.BatchNorm2d(CHANNELS)


def _samples(n: int, dims: int, seed: int = 0) -> Tensor:
    """The same for the same arguments, so that a worker can make its slice by itself. Means and scales differ by channel."""
    made = torch.randn(n, CHANNELS, *SIDES[dims], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    scale = torch.arange(1, CHANNELS + 1).view(-1, *[1] * len(SIDES[dims]))
    return made * scale + 3 * scale


def _noisy(layer: nn.Module) -> nn.Module:
    """`layer` in float64 with weights and running statistics that are not all zeros and ones."""
    generator = torch.Generator().manual_seed(7)
    for value in layer.double().state_dict().values():
        if value.is_floating_point():
            value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
    return layer
