"""On a real GPU: our optimizers never wait for it, and a CUDA graph repeats their step."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.config import Config
from paceline.optim import OPTIMIZERS, Lamb, Lars, Muon, NovoGrad, make_optimizer
from paceline.optim.flat import Flat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: make test ARGS=tests/gpu"),
]

ALL = [{"optimizer": name} for name in OPTIMIZERS] + [
    {"optimizer": "muon", "fixed_norm": True, "rest": "adamw"},
    {"optimizer": "lars", "adapt_all": True},
    {"optimizer": "novograd", "beta2": 0.0, "grad_averaging": True},
]
every = pytest.mark.parametrize("options", ALL, ids=lambda options: "-".join(map(str, options.values())))


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 3), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(64, 32), nn.Linear(32, 10))
    return model.to("cuda", dtype).to(memory_format=torch.channels_last)


def with_gradients(model: nn.Module) -> list[Tensor]:
    """Gradients that stay where they are, as a graph needs them."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def fill(gradients: list[Tensor], step: int) -> None:
    source = torch.Generator("cuda").manual_seed(step)
    for gradient in gradients:
        gradient.copy_(torch.randn(gradient.shape, generator=source, device="cuda"))


def set_lr(optimizer: Optimizer, lr: float | Tensor) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


@every
def test_a_graph_repeats_the_step(options: dict) -> None:
    """What the plain step does, the learning rate read again at each replay."""
    config = Config(base_lr=0.01, weight_decay=0.01, **options)
    rates = [0.01, 0.02, 0.005, 0.01]
    plain, captured = network(), network()
    optimizer, lr = make_optimizer(plain, config), torch.tensor(0.01, device="cuda")
    gradients = with_gradients(plain)
    set_lr(optimizer, lr)
    for step, rate in enumerate(rates):
        fill(gradients, step)
        lr.fill_(rate)
        optimizer.step()
    expected = [parameter.detach().clone() for parameter in plain.parameters()]

    optimizer, lr = make_optimizer(captured, config), torch.tensor(0.01, device="cuda")
    gradients = with_gradients(captured)
    set_lr(optimizer, lr)
    fill(gradients, 0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer.step()  # what is made in a first step
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    for step, rate in list(enumerate(rates))[1:]:
        fill(gradients, step)
        lr.fill_(rate)
        graph.replay()
    torch.cuda.synchronize()
    for found, wanted in zip(captured.parameters(), expected, strict=True):
        if options["optimizer"] == "muon":  # cuBLAS may choose other kernels in a graph, and bf16 has 8 bits
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
        else:
            assert torch.equal(found, wanted)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_never_waits(options: dict, dtype: torch.dtype) -> None:
    model = network(dtype)
    optimizer = make_optimizer(model, Config(base_lr=0.01, **options))
    gradients = with_gradients(model)
    fill(gradients, 0)
    set_lr(optimizer, torch.tensor(0.01, device="cuda"))
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
        next(iter(model.parameters())).grad = None  # a stretch of the others
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every
def test_the_gpu_does_what_the_cpu_does(options: dict) -> None:
    model = network()
    other = copy.deepcopy(model).cpu()
    config = Config(base_lr=0.01, weight_decay=0.01, **options)
    pairs = [(model, make_optimizer(model, config), with_gradients(model)), (other, make_optimizer(other, config), [])]
    for step in range(5):
        fill(pairs[0][2], step)
        for here, there in zip(model.parameters(), other.parameters(), strict=True):
            assert here.grad is not None
            there.grad = torch.empty_like(there).copy_(here.grad)
        for _, optimizer, _ in pairs:
            optimizer.step()
    # Muon's products are bf16 on a GPU: 2^-8 of a step of length 1 an element, times lr, in each of five steps
    tolerance = 5e-3 if options["optimizer"] == "muon" else 1e-5
    for here, there in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(here.detach().cpu(), there.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["lars", "lamb", "novograd"])
def test_bf16_is_trained_in_float32(name: str) -> None:
    small = network(torch.bfloat16)
    large = copy.deepcopy(small).float()
    config = Config(optimizer=name, base_lr=1e-4)
    optimizer, reference = make_optimizer(small, config), make_optimizer(large, config)
    gradients = with_gradients(small)
    for step in range(10):
        fill(gradients, step)
        for a, b in zip(small.parameters(), large.parameters(), strict=True):
            assert a.grad is not None
            b.grad = a.grad.float()
        optimizer.step()
        reference.step()
    for a, b in zip(small.parameters(), large.parameters(), strict=True):
        assert optimizer.state[a]["master"].dtype == torch.float32
        torch.testing.assert_close(optimizer.state[a]["master"], b.detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(a.detach(), optimizer.state[a]["master"].bfloat16())


@pytest.mark.parametrize("name", ["lars", "lamb", "novograd", "muon"])
def test_few_kernels(name: str) -> None:
    """Not a kernel a tensor: nearly as many for 120 tensors as for 24, within the multi-tensor kernels' own limits."""
    counts = []
    for blocks in (4, 20):
        layers = [nn.Linear(8, 8) for _ in range(3 * blocks)]
        model = nn.Sequential(*layers).to("cuda")
        optimizer = make_optimizer(model, Config(optimizer=name, base_lr=0.01))
        fill(with_gradients(model), 0)
        optimizer.step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            optimizer.step()
            torch.cuda.synchronize()
        counts.append(sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events() or ()))
    assert counts[0] > 0
    assert counts[1] < counts[0] + 24


@pytest.mark.parametrize("kind", [Lars, Lamb, NovoGrad, Muon])
def test_a_class_by_itself_replays_its_own_graph(kind: Callable[..., Flat]) -> None:
    """The same weights as without."""
    found = []
    for records in (False, True):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in ((16, 3, 3, 3), (32, 16), (32, 16))]
        optimizer = kind(parameters, lr=0.01)
        optimizer.uses_graph = records
        for step in range(6):
            source = torch.Generator("cuda").manual_seed(step)
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=source, device="cuda")
            set_lr(optimizer, 0.01 / (1 + step))
            optimizer.step()
        assert (optimizer._capture.graph is not None) is records
        found.append([parameter.detach().clone() for parameter in parameters])
    for one, other in zip(*found, strict=True):
        tolerance = 1e-3 if kind is Muon else 1e-6
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
