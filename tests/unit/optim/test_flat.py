"""What every optimizer with flat buffers must do, whatever its formula."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.optim import Lamb, Lars, Muon, NovoGrad, flat
from paceline.optim.flat import Flat, index_of

Make = Callable[..., Optimizer]

MAKERS: dict[str, Make] = {
    "lars": lambda groups, **more: Lars(groups, **{"lr": 0.5, "weight_decay": 0.01, "trust_coefficient": 0.1, **more}),
    "lamb": lambda groups, **more: Lamb(groups, **{"lr": 0.05, "weight_decay": 0.01, **more}),
    "novograd": lambda groups, **more: NovoGrad(groups, **{"lr": 0.05, "weight_decay": 0.01, **more}),
    "muon": lambda groups, **more: Muon(groups, **{"lr": 0.05, "weight_decay": 0.01, **more}),
}
MATRICES = ((4, 6), (5, 3), (4, 3, 3, 3), (4, 6), (3, 2))
ALL = (*MATRICES, (7,), (1,), ())
each = pytest.mark.parametrize("name", MAKERS)


def shapes(name: str) -> tuple[tuple[int, ...], ...]:
    return MATRICES if name == "muon" else ALL


def parameters(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[nn.Parameter]:
    """Of several shapes; the convolution channels-last."""
    source = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=source, dtype=torch.float64).to(dtype) for shape in shapes(name)]
    return [nn.Parameter(t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t) for t in made]


def give_gradients(found: list[nn.Parameter], step: int, factor: float = 1.0, without: tuple[int, ...] = ()) -> None:
    source = torch.Generator().manual_seed(1000 + step)
    for number, parameter in enumerate(found):
        gradient = torch.randn(parameter.shape, generator=source, dtype=torch.float64) * factor
        like = torch.empty_like(parameter)
        parameter.grad = None if number in without else like.copy_(gradient)


def run(
    optimizer: Optimizer, found: list[nn.Parameter], steps: range = range(5), before: Callable[[int], None] = lambda step: None
) -> list[Tensor]:
    for step in steps:
        give_gradients(found, step)
        before(step)
        optimizer.step()
    return [parameter.detach().clone() for parameter in found]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def moved(before: Tensor, after: Tensor) -> bool:
    return not torch.equal(before, after)


@each
def test_a_pack_equals_one_optimizer_per_parameter(name: str) -> None:
    """The values of one tensor never reach another."""
    together, apart = parameters(name), parameters(name)
    alone = [MAKERS[name]([parameter]) for parameter in apart]
    for step in range(5):
        give_gradients(apart, step)
        for optimizer in alone:
            optimizer.step()
    for a, b, start in zip(run(MAKERS[name](together), together), apart, parameters(name), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-12, atol=1e-12)
        assert moved(a, start.detach())


@each
def test_the_gpus_index_gives_the_same(name: str) -> None:
    """On a GPU an index expands one value per tensor to the elements; on a CPU it is done tensor by tensor."""
    one, other = parameters(name), parameters(name)
    optimizer = MAKERS[name](other)
    for packs in optimizer._packs:  # type: ignore[attr-defined]
        for pack in packs:
            pack.index = index_of(pack.parameters)
    reference = MAKERS[name](one)
    for step, without in enumerate(((), (1,), (0, 3), ())):
        for found, stepped in ((one, reference), (other, optimizer)):
            give_gradients(found, step, without=without)
            stepped.step()
    assert same([p.detach() for p in one], [p.detach() for p in other])


@each
def test_layout_makes_no_difference(name: str) -> None:
    """Channels-last, transposed, and every other value of a larger tensor: all give what plain tensors give."""
    plain = [nn.Parameter(parameter.detach().contiguous().clone()) for parameter in parameters(name)]
    odd = []
    for number, parameter in enumerate(parameters(name)):
        values = parameter.detach()
        if number == 0:
            values = values.t().contiguous().t()
        if number == 1:
            values = torch.stack([values, values], -1)[..., 0]
        if number == 4:  # gaps, and interleaved rows
            values = torch.zeros(9, dtype=torch.float64).as_strided((3, 2), (2, 3)).copy_(values)
        odd.append(nn.Parameter(values))
    assert not odd[0].is_contiguous()
    assert odd[1].stride()[-1] == 2
    assert odd[2].is_contiguous(memory_format=torch.channels_last)
    for a, b in zip(run(MAKERS[name](plain), plain), run(MAKERS[name](odd), odd), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@each
def test_a_parameter_without_elements(name: str) -> None:
    one, other = parameters(name), parameters(name)
    empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
    empty.grad = torch.zeros_like(empty)
    assert same(run(MAKERS[name](one), one), run(MAKERS[name]([empty, *other]), other))


@each
def test_a_gradient_of_another_layout(name: str) -> None:
    one, other = parameters(name), parameters(name)
    optimizer = MAKERS[name](other)

    def turn(step: int) -> None:
        for parameter in other:
            assert parameter.grad is not None
            parameter.grad = parameter.grad.contiguous()

    assert same(run(MAKERS[name](one), one), run(optimizer, other, before=turn))
    assert other[2].grad is not None
    assert other[2].grad.stride() != other[2].stride()


@each
def test_gradients_are_never_written(name: str) -> None:
    found = parameters(name)
    optimizer = MAKERS[name](found)
    give_gradients(found, 0)
    kept = [parameter.grad.clone() for parameter in found if parameter.grad is not None]
    optimizer.step()
    optimizer.step()
    assert same(kept, [parameter.grad for parameter in found if parameter.grad is not None])


@each
def test_state_exists_from_the_start_and_keeps_its_address(name: str) -> None:
    found = parameters(name)
    optimizer = MAKERS[name](found)

    def where() -> list[int]:
        return [value.data_ptr() for parameter in found for value in optimizer.state[parameter].values()]

    at = where()
    assert len(at) >= len(found)
    assert not any(value.any() for parameter in found for value in optimizer.state[parameter].values())
    for parameter in found:
        for value in optimizer.state[parameter].values():
            assert value.ndim == 0 or (value.shape == parameter.shape and value.stride() == parameter.stride())
    run(optimizer, found)
    assert all(any(bool(value.any()) for value in optimizer.state[parameter].values()) for parameter in found)
    optimizer.load_state_dict(optimizer.state_dict())
    assert where() == at


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", ["dict", "file", "pickle", "copy"])
def test_interrupted_equals_uninterrupted(name: str, dtype: torch.dtype, way: str) -> None:
    """Bit for bit, into a fresh optimizer over fresh parameters."""
    whole = parameters(name, dtype)
    expected = run(MAKERS[name](whole), whole, range(8))
    first = parameters(name, dtype)
    optimizer = MAKERS[name](first)
    run(optimizer, first, range(4))
    if way in ("pickle", "copy"):
        other = copy.deepcopy(optimizer) if way == "copy" else pickle.loads(pickle.dumps(optimizer))
        second = list(other.param_groups[0]["params"])
        assert not {id(parameter) for parameter in second} & {id(parameter) for parameter in first}
    else:
        state: Any = optimizer.state_dict()
        if way == "file":
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file)
        second = [nn.Parameter(parameter.detach().clone()) for parameter in first]
        other = MAKERS[name](second)
        run(MAKERS[name](parameters(name, dtype)), parameters(name, dtype))
        other.load_state_dict(state)
    run(optimizer, first, range(20, 23))  # the saved state must not change with it
    assert same(run(other, second, range(4, 8)), expected)


@each
def test_state_that_is_not_given_is_fresh(name: str) -> None:
    one, other = parameters(name, torch.bfloat16), parameters(name, torch.bfloat16)
    optimizer = MAKERS[name](one)
    run(optimizer, one)
    for parameter, value in zip(one, other, strict=True):
        parameter.data.copy_(value.data)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    assert same(run(optimizer, one), run(MAKERS[name](other), other))


@each
def test_parameters_without_gradients_are_left_alone(name: str) -> None:
    found, fewer = parameters(name), parameters(name)
    optimizer = MAKERS[name](found)
    run(optimizer, found, range(2))
    kept = [parameter.detach().clone() for parameter in found]
    states = copy.deepcopy([optimizer.state[parameter] for parameter in found])
    give_gradients(found, 2, without=(1, 3))
    optimizer.step()
    for number, parameter in enumerate(found):
        still = all(torch.equal(optimizer.state[parameter][key], states[number][key]) for key in states[number])
        assert moved(kept[number], parameter.detach()) == (number not in (1, 3))
        assert still == (number in (1, 3))
    # The others behave as if they were alone.
    present = [parameter for number, parameter in enumerate(fewer) if number not in (1, 3)]
    alone = MAKERS[name](present)
    for step in range(3):
        give_gradients(fewer, step)
        alone.step()
    for number, (a, b) in enumerate(zip(found, fewer, strict=True)):
        if number not in (1, 3):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    run(optimizer, found, range(3, 5))


@each
def test_no_gradients_at_all(name: str) -> None:
    found = parameters(name)
    kept = [parameter.detach().clone() for parameter in found]
    MAKERS[name](found).step()
    assert same(kept, [parameter.detach() for parameter in found])


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_learning_rate_may_be_a_tensor(name: str, dtype: torch.dtype) -> None:
    one, other = parameters(name, dtype), parameters(name, dtype)
    rate = torch.tensor(0.25)
    optimizer = MAKERS[name](other, lr=rate)
    assert all(group["capturable"] for group in optimizer.param_groups)
    expected = run(MAKERS[name](one, lr=0.25), one)
    assert same(run(optimizer, other), expected)
    rate.fill_(0.0)  # read at each step
    assert same(run(optimizer, other), expected)


@each
def test_groups_have_their_own_settings(name: str) -> None:
    """The same as two optimizers."""
    together, apart = parameters(name), parameters(name)
    optimizer = MAKERS[name]([{"params": together[:2]}, {"params": together[2:4], "lr": 0.01, "weight_decay": 0.3}])
    optimizer.add_param_group({"params": together[4:], "lr": 0.0})
    first, second = MAKERS[name](apart[:2]), MAKERS[name](apart[2:4], lr=0.01, weight_decay=0.3)
    for step in range(4):
        give_gradients(together, step)
        give_gradients(apart, step)
        optimizer.step()
        first.step()
        second.step()
    assert same([p.detach() for p in together], [p.detach() for p in apart])
    assert all(optimizer.state[parameter] for parameter in together)


@each
def test_sixteen_bits_are_trained_in_thirty_two(name: str) -> None:
    """The parameters are the float32 run's, rounded; steps too small for bf16 add up in the master copy."""
    small = parameters(name, torch.bfloat16)
    large = [nn.Parameter(parameter.detach().float()) for parameter in small]
    optimizer, reference = MAKERS[name](small, lr=1e-4), MAKERS[name](large, lr=1e-4)
    for step in range(30):
        give_gradients(small, step)
        for a, b in zip(small, large, strict=True):
            assert a.grad is not None
            b.grad = a.grad.float()
        optimizer.step()
        reference.step()
    for a, b in zip(small, large, strict=True):
        state = optimizer.state[a]
        assert {value.dtype for value in state.values()} == {torch.float32}
        torch.testing.assert_close(state["master"], b.detach(), rtol=0, atol=0)
        assert torch.equal(a.detach(), b.detach().bfloat16())


@pytest.mark.parametrize("name", ["lars", "lamb", "novograd", "muon"])
def test_scaling_the_gradient_leaves_the_path(name: str) -> None:
    without = {} if name == "muon" else {"eps": 0.0}
    ends = []
    for factor in (1.0, 2.0**10):
        found = parameters(name)
        optimizer = MAKERS[name](found, weight_decay=0.0, **without)
        for step in range(10):
            give_gradients(found, step, factor)
            optimizer.step()
        ends.append([parameter.detach() for parameter in found])
    for a, b, start in zip(*ends, parameters(name), strict=True):
        assert moved(a, start.detach())
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@each
def test_zero_gradients_and_zero_weights_stay_finite(name: str) -> None:
    found = parameters(name)
    optimizer = MAKERS[name](found, **({} if name == "muon" else {"eps": 0.0}))
    with torch.no_grad():
        found[0].zero_()
    for step in range(3):
        give_gradients(found, step)
        found[1].grad = torch.zeros_like(found[1])
        if step < 2:
            found[2].grad = torch.zeros_like(found[2])
        optimizer.step()
    assert all(parameter.isfinite().all() for parameter in found)
    assert found[0].any()


@each
def test_a_gradient_that_is_not_a_number_shows(name: str) -> None:
    found = parameters(name)
    optimizer = MAKERS[name](found, **({} if name == "muon" else {"eps": 0.0}))
    give_gradients(found, 0)
    assert found[0].grad is not None
    found[0].grad[0, 0] = torch.nan
    optimizer.step()
    assert not found[0].isfinite().all()
    assert all(parameter.isfinite().all() for parameter in found[1:])


@each
def test_a_closure_is_evaluated_with_gradients(name: str) -> None:
    found = parameters(name)
    optimizer = MAKERS[name](found)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = torch.stack([parameter.square().sum() for parameter in found]).sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    for _ in range(10):
        last = optimizer.step(closure)
    assert last.item() < first.item()


@each
def test_large_tensors_are_cut_for_the_caches(name: str) -> None:
    """More than one buffer per group on a CPU; the same as one optimizer per tensor."""
    made = [torch.randn(300, 200, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in range(3)]
    together, apart = ([nn.Parameter(t.clone()) for t in made] for _ in range(2))
    optimizer = MAKERS[name](together)
    assert len(optimizer._packs[0]) > 1  # type: ignore[attr-defined]
    alone = [MAKERS[name]([parameter]) for parameter in apart]
    for step in range(2):
        give_gradients(together, step)
        give_gradients(apart, step)
        for each_one in (optimizer, *alone):
            each_one.step()
    assert same([p.detach() for p in together], [p.detach() for p in apart])


@each
def test_unsupported_parameters_are_refused(name: str) -> None:
    found = parameters(name)
    optimizer = MAKERS[name](found)
    found[0].grad = torch.zeros_like(found[0]).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()
    with pytest.raises(ValueError, match="lr is -1"):
        MAKERS[name](found, lr=-1.0)
    with pytest.raises(TypeError, match="complex"):
        MAKERS[name]([nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))])


@pytest.mark.parametrize("name", ["lamb", "novograd"])
def test_betas_lie_between_0_and_1(name: str) -> None:
    with pytest.raises(ValueError, match=r"a beta is 1\.0"):
        MAKERS[name](parameters(name), betas=(0.9, 1.0))


class Recording:
    """CUDA graphs simulated in Python: work during capture is not done, and is done at each replay."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type[Flat]) -> None:
        self.recorded, self._calls, real = 0, None, kind.update
        recording = self

        class Graph:
            def __init__(self) -> None:
                self.calls: list = []

            def replay(self) -> None:
                for optimizer, pack, group in self.calls:
                    real(optimizer, pack, group)

        @contextmanager
        def graph(made: Graph, capture_error_mode: str) -> Iterator[None]:
            recording.recorded += 1
            recording._calls = made.calls
            yield
            recording._calls = None

        def update(optimizer: Flat, pack: Any, group: Any) -> None:
            if recording._calls is None:
                real(optimizer, pack, group)
            else:
                recording._calls.append((optimizer, pack, group))

        monkeypatch.setattr(kind, "update", update)
        monkeypatch.setattr(flat, "_on_one_gpu", lambda parameters: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", graph)


@pytest.mark.parametrize("kind", [Lars, Lamb, NovoGrad])
def test_a_captured_step_equals_the_plain_one(kind, monkeypatch):
    """From the third call on a graph is replayed: with the learning rate of now, new gradients, after a change of options or of
    where the weights lie a new one, and plainly where a gradient is missing."""
    recording = Recording(monkeypatch, kind)

    def train(records: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        found = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(2, 2))]
        groups = [{"params": found[:2], "weight_decay": 0.01}, {"params": found[2:], "weight_decay": 0.0}]
        optimizer = kind(groups, lr=0.1)
        optimizer.uses_graph = records
        for step in range(14):
            for parameter in found:
                parameter.grad = torch.randn_like(parameter)
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(0.1 / (1 + step)) if step % 2 else 0.1 / (1 + step)
            if step == 5:
                found[1].grad = None
            if step == 7:
                optimizer.param_groups[0]["weight_decay"] = 0.1
            if step == 11:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.step()
        return [parameter.detach().clone() for parameter in found]

    plain = train(False)
    assert recording.recorded == 0
    replayed = train(True)
    assert recording.recorded == 3  # at the third call, after the change, after loading
    for one, other in zip(plain, replayed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
