"""SyncNorm on real workers against BatchNorm on all their samples at once; PartNorm compiled against PartNorm."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.processes import run_workers
from paceline.core.norms import PartNorm
from paceline.core.sync_norm import SyncNorm
from paceline.dist.world import World
from unit.core.test_norms import CHANNELS, _batch_norm, _noisy, _samples


@pytest.mark.parametrize("sizes", [(5, 3), (4, 1, 0)])
def test_sync_norm_is_batch_norm_on_everyones_samples(sizes, tmp_path):
    run_workers(_sync_worker, len(sizes), sizes, tmp_path)
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


def _sync_worker(world: World, sizes: tuple[int, ...], folder: Path) -> None:
    rank, result = world.rank, {}
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


@pytest.mark.parametrize(("dims", "channels_last"), [(1, False), (2, False), (2, True)])
def test_compiled_part_norm_is_the_native_one(dims, channels_last):
    """Compiled, parts are normalized by plain operations on a view: the same output, gradients and running statistics."""
    inputs, weights = _samples(12, dims), _samples(12, dims, seed=1)
    if channels_last:
        inputs = inputs.to(memory_format=torch.channels_last)
    found = []
    for compiled in (False, True):
        layer = _noisy(PartNorm(CHANNELS, None))
        layer.parts = 3
        for name in ("running_mean", "running_var"):
            setattr(layer, name, torch.stack([getattr(layer, name)] * 3))
        layer.num_batches_tracked = torch.zeros(3, dtype=torch.int64)
        fed = inputs.clone().requires_grad_()
        output = (torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer)(fed)
        (output * weights).sum().backward()
        found.append([output, fed.grad, *(each.grad for each in layer.parameters()), *layer.buffers()])
    for native, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, native, rtol=1e-4, atol=1e-5)
