"""The norms against torch's own: part norm to one BatchNorm a part, sync norm to BatchNorm on all workers' samples at once."""

import copy
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.core.norms import PartNorm, can_group, group_batch_norms, make_norm
from paceline.core.sync_norm import SyncNorm
from paceline.errors import UsageError

CHANNELS = 3


SIDES = {1: (), "sequence": (6,), 2: (4, 5), 3: (2, 3, 4)}


PLAIN = {1: nn.BatchNorm1d, "sequence": nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


OPTIONS = [
    {},
    {"momentum": None},
    {"affine": False},
    {"track_running_stats": False},
    {"affine": False, "track_running_stats": False, "momentum": None},
    {"eps": 0.1, "momentum": 0.7},
]


@pytest.mark.parametrize(("dims", "channels_last"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize(("n", "part_size"), [(12, 4), (12, 12), (12, 100), (10, 4), (7, 3), (11, 2)])
def test_part_norm_is_one_batch_norm_a_part(n, part_size, dims, channels_last):
    # 11 by 2 without pixels: five parts of two and one of a single value.
    inputs, weights = _samples(n, dims), _samples(n, dims, seed=1)
    if channels_last:
        inputs = inputs.to(memory_format=torch.channels_last)
    layer = _noisy(PartNorm(CHANNELS, part_size))
    fed = inputs.clone().requires_grad_()
    output = layer(fed)
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
        torch.testing.assert_close(fed.grad[part::parts], samples.grad)
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
def test_parts_of_one_sample_are_normalized_over_its_pixels(channels_last):
    inputs, weights = _samples(4, 2), _samples(4, 2, seed=1)
    if channels_last:
        inputs = inputs.to(memory_format=torch.channels_last)
    fed = inputs.clone().requires_grad_()
    output = _noisy(PartNorm(CHANNELS, 1))(fed)
    (output * weights).sum().backward()
    for part in range(4):
        sample = inputs[part : part + 1].contiguous().requires_grad_()
        expected = _noisy(_batch_norm(2))(sample)
        (expected * weights[part]).sum().backward()
        torch.testing.assert_close(output[part : part + 1], expected)
        torch.testing.assert_close(fed.grad[part : part + 1], sample.grad)


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


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize("dims", PLAIN)
def test_each_part_of_a_pass_is_normalized_as_if_alone(dims, parts, options):
    together = group_batch_norms(_noisy(_batch_norm(dims, **options)))
    alone = [_noisy(_batch_norm(dims, **options)) for _ in range(parts)]
    _assert_as_alone(together, alone, [_samples(4 * parts, dims, seed) for seed in range(3)])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("options", OPTIONS[:-1], ids=str)
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize(("samples", "part_size"), [(6, 2), (6, 6), (7, 3), (8, 100)])
def test_each_part_of_a_pass_has_its_own_ghosts(samples, part_size, dims, parts, options):
    together = _noisy(PartNorm(CHANNELS, part_size, **options))
    alone = [_noisy(PartNorm(CHANNELS, part_size, **options)) for _ in range(parts)]
    _assert_as_alone(together, alone, [_samples(samples * parts, dims, seed) for seed in range(3)])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("samples", "part_size"), [(3, 1), (5, 2)])
def test_ghosts_of_a_single_value_take_the_rows_of_their_part(samples, part_size):
    # 3 by 1: nothing but such ghosts, so no row moves. 5 by 2: two ghosts of two and one of a single value.
    together = _noisy(PartNorm(CHANNELS, part_size))
    alone = [_noisy(PartNorm(CHANNELS, part_size)) for _ in range(3)]
    _assert_as_alone(together, alone, [_samples(samples * 3, 1, seed) for seed in range(3)])
    assert together.num_batches_tracked.tolist() == [0 if part_size == 1 else 3] * 3


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("momentum", [None, 0.1])
@pytest.mark.parametrize("part_size", [None, 2, 3])
def test_parts_that_have_seen_unequal_numbers_of_passes(part_size, momentum):
    together, *alone = (_noisy(PartNorm(CHANNELS, part_size, momentum=momentum)) for _ in range(4))
    for part, norm in enumerate(alone):
        norm.num_batches_tracked += part
    _assert_as_alone(together, alone, [_samples(12, 2, seed) for seed in range(3)])
    assert together.num_batches_tracked.tolist() == [3, 4, 5]


@pytest.mark.usefixtures("one_thread")
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_parts_of_any_shape_are_as_alone(data):
    parts, samples, channels = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 9)), data.draw(st.integers(1, 20))
    sides = data.draw(st.lists(st.integers(1, 5), max_size=3))
    part_size = data.draw(st.none() | st.integers(1, 10))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    if part_size is None and samples * torch.Size(sides).numel() == 1:
        samples = 2  # a single value: refused, alone and together
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    batches = [torch.randn(samples * parts, channels, *sides, generator=generator, dtype=torch.float64) for _ in range(2)]
    together, *alone = (_noisy(PartNorm(channels, part_size)).to(dtype) for _ in range(parts + 1))
    # Of very few values the variance may be next to nothing, and gradients then mostly rounding.
    rounding = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.float32 else {"rtol": 1e-5, "atol": 1e-7}
    exact = part_size is None or samples <= 3 * part_size
    _assert_as_alone(together, alone, [batch.to(dtype) for batch in batches], exact=exact, **rounding)


@pytest.mark.parametrize("part_size", [None, 3])
@pytest.mark.parametrize("samples", [1, 6])
def test_parts_of_a_channels_last_batch(samples, part_size):
    # The part alone is normalized by another kernel, that of channels-last tensors: equal to rounding.
    together, *alone = (_noisy(PartNorm(CHANNELS, part_size)) for _ in range(4))
    batches = [_samples(samples * 3, 2, seed).to(memory_format=torch.channels_last) for seed in range(2)]
    _assert_as_alone(together, alone, batches, exact=False)


@pytest.mark.parametrize("part_size", [None, 2])
def test_a_pass_can_be_differentiated_after_the_next(part_size):
    layer = _noisy(PartNorm(CHANNELS, part_size))
    _give_rows(layer, [_noisy(_batch_norm(2)) for _ in range(2)])
    inputs = [_samples(8, 2, seed).requires_grad_() for seed in range(2)]
    outputs = [layer(each) for each in inputs]
    for output, each in zip(outputs, inputs, strict=True):
        output.square().sum().backward()
        assert each.grad.isfinite().all()


@pytest.mark.parametrize("part_size", [None, 3])
def test_one_row_for_many_parts_moves_once_to_their_mean(part_size):
    layer = _noisy(PartNorm(CHANNELS, part_size))
    layer.parts = 3
    inputs = _samples(12, 2)
    output = layer(inputs)
    alone = [_noisy(PartNorm(CHANNELS, part_size)) for _ in range(3)]
    for part, norm in enumerate(alone):
        torch.testing.assert_close(output[part::3], norm(inputs[part::3]))
    for name in ("running_mean", "running_var"):
        mean = torch.stack([getattr(norm, name) for norm in alone]).mean(0)
        torch.testing.assert_close(getattr(layer, name), mean)
    assert layer.num_batches_tracked == 1


def test_without_running_statistics_evaluation_takes_the_batch_as_one_group():
    layer = PartNorm(CHANNELS, 2, track_running_stats=False).double().eval()
    layer.parts = 2
    inputs = _samples(8, 2)
    assert torch.equal(layer(inputs), _batch_norm(2, track_running_stats=False).double()(inputs))


def test_statistics_no_longer_tracked_stay():
    layer, reference = (_noisy(PartNorm(CHANNELS, 3)) for _ in range(2))
    layer.track_running_stats = False
    output = layer(_samples(6, 2))
    assert torch.equal(output, reference(_samples(6, 2)))
    before = _noisy(PartNorm(CHANNELS, 3)).state_dict()
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


@pytest.mark.parametrize(("n", "part_size", "tracked"), [(3, None, True), (3, None, False), (3, 1, False), (15, 2, False)])
def test_a_single_value_with_nothing_to_take_instead_is_refused(n, part_size, tracked):
    layer = PartNorm(CHANNELS, part_size, track_running_stats=tracked)
    layer.parts = 3
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.randn(n, CHANNELS))


def test_one_group_keeps_its_layout():
    inputs = _samples(4, 2).to(memory_format=torch.channels_last)
    assert _noisy(PartNorm(CHANNELS, 4))(inputs).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("samples", "found"), [(4, "8 rows in a pass of 4 samples"), (None, "8 rows in a pass of 3 equal parts")]
)
def test_rows_that_are_not_one_a_sample_are_refused(samples, found):
    layer = group_batch_norms(nn.BatchNorm1d(CHANNELS))
    layer.parts, layer.samples = (2 if samples else 3), samples
    with pytest.raises(UsageError, match=f"a batch norm of 3 channels got {found}: .*--parts-at-once 1") as refused:
        layer(torch.randn(8, CHANNELS))
    assert "\n" not in str(refused.value)
    assert layer.num_batches_tracked == 0
    layer.eval()(torch.randn(8, CHANNELS))
    layer.train().parts = 1
    layer(torch.randn(8, CHANNELS))


def test_rows_that_do_not_fit_the_parts_are_our_mistake():
    layer = PartNorm(CHANNELS, 2)
    _give_rows(layer, [PartNorm(CHANNELS, 2) for _ in range(2)])
    layer.parts = 3
    with pytest.raises(AssertionError, match="2 rows of running statistics for 3 parts"):
        layer(torch.randn(6, CHANNELS))


def _assert_as_alone(
    together: PartNorm, alone: list[nn.Module], batches: list[Tensor], *, exact: bool = True, **rounding
) -> None:
    """Give `together` a row for each norm of `alone`, then train all on `batches`, each norm alone on its part."""
    parts = len(alone)
    for part, norm in enumerate(alone):  # rows that differ, so that none can stand for another
        if norm.running_mean is not None:
            norm.running_mean += part
            norm.running_var *= part + 1
    _give_rows(together, alone)
    together.samples = len(batches[0])
    for step, batch in enumerate(batches):
        fed = batch.detach().requires_grad_()
        weights = torch.randn(batch.shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(batch.dtype)
        output = together(fed)
        (output * weights).sum().backward()
        for part, norm in enumerate(alone):
            samples = batch[part::parts].clone(memory_format=torch.contiguous_format if exact else torch.preserve_format)
            expected = norm(samples.requires_grad_())
            (expected * weights[part::parts]).sum().backward()
            _assert_same(output[part::parts], expected, exact)
            torch.testing.assert_close(fed.grad[part::parts], samples.grad, **rounding)
    if together.affine:
        torch.testing.assert_close(together.weight.grad, sum(norm.weight.grad for norm in alone), **rounding)
        torch.testing.assert_close(together.bias.grad, sum(norm.bias.grad for norm in alone), **rounding)
    for name, rows in together.named_buffers():
        for part, norm in enumerate(alone):
            _assert_same(rows[part] if parts > 1 else rows, getattr(norm, name), exact)


def _assert_same(found: Tensor, expected: Tensor, exact: bool) -> None:
    torch.testing.assert_close(found, expected, **({"rtol": 0, "atol": 0} if exact else {}))


def _give_rows(layer: PartNorm, alone: list[nn.Module]) -> None:
    """Do as the trainer does before a pass: a row of running statistics for each part."""
    layer.parts = len(alone)
    for name, _ in list(layer.named_buffers()):
        rows = torch.stack([getattr(norm, name) for norm in alone])
        layer._buffers[name] = rows if len(alone) > 1 else rows[0]


class _Net(nn.Module):
    """Batch norms of each dimension, nested, one of them in two places, one with options of its own, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.BatchNorm2d(4)
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3), shared, nn.ReLU())
        self.block = nn.ModuleDict({"conv": nn.Conv2d(4, 4, 3), "norm": nn.Sequential(nn.BatchNorm2d(4, 0.1, None), shared)})
        self.frozen = nn.BatchNorm3d(1, affine=False).eval()
        self.head = nn.Sequential(
            nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.BatchNorm1d(5, momentum=0.3)
        )

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.block["norm"](self.block["conv"](self.stem(self.frozen(input.unsqueeze(1)).squeeze(1))))
        return self.head(hidden.mean((2, 3)))


def test_grouping_keeps_the_model():
    torch.manual_seed(0)
    plain = _Net()
    model = copy.deepcopy(plain)
    before = model.state_dict(keep_vars=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    hook = model.block["norm"][0].register_forward_hook(lambda module, inputs, output: seen.append(type(module)))
    assert group_batch_norms(model) is model

    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    norms = [module for module in model.modules() if isinstance(module, PartNorm)]
    assert len(norms) == 5
    assert all(norm.part_size is None for norm in norms)
    assert not any(type(module) in PLAIN.values() for module in model.modules())
    assert model.stem[1] is model.block["norm"][1]
    assert [module.training for module in model.modules()] == [module.training for module in plain.modules()]
    assert (model.block["norm"][0].eps, model.block["norm"][0].momentum) == (0.1, None)

    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        inputs = torch.randn(6, 1, 8, 8)
        for net, steps in ((model, optimizer), (plain, reference)):
            steps.zero_grad()
            net(inputs).square().sum().backward()
            steps.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)
    assert seen == [PartNorm] * 3
    hook.remove()
    model.eval()(torch.randn(2, 1, 8, 8))
    assert len(seen) == 3
    assert copy.deepcopy(model).stem[1].parts == 1


def test_grouping_takes_a_batch_norm_for_a_model():
    root = nn.BatchNorm2d(CHANNELS)
    weight = root.weight
    grouped = group_batch_norms(root)
    assert isinstance(grouped, PartNorm)
    assert grouped.weight is weight
    assert "part_size=None" in repr(grouped)


class _OwnNorm(nn.BatchNorm2d):
    pass


class _OwnPartNorm(PartNorm):
    pass


def _with_own_forward() -> nn.Module:
    layer = nn.BatchNorm2d(4)
    layer.forward = lambda input: input
    return layer


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: _OwnNorm(4), "is a _OwnNorm"),
        (lambda: _OwnPartNorm(4, 2), "is a _OwnPartNorm"),
        (lambda: nn.LazyBatchNorm2d(), "is a LazyBatchNorm2d"),
        (_with_own_forward, "is a BatchNorm2d with a forward of its own"),
        (lambda: nn.InstanceNorm2d(4, track_running_stats=True), "is a InstanceNorm2d with running statistics"),
        (lambda: nn.SyncBatchNorm(4), "is a SyncBatchNorm, which takes its statistics over all workers"),
        (lambda: SyncNorm(4), "is a SyncNorm, which takes its statistics over all workers"),
    ],
)
def test_layers_that_cannot_be_grouped_are_named_and_left(layer, reason):
    first, second = layer(), layer()
    kind = type(first)
    model = nn.ModuleDict({"norm": nn.BatchNorm2d(4), "block": nn.Sequential(nn.ReLU(), first), "last": second})
    assert can_group(model) == f"block.1 {reason}"
    assert can_group(first) == f"the model {reason}"
    group_batch_norms(model)
    assert type(model["norm"]) is PartNorm
    assert type(first) is kind


def test_models_that_can_be_grouped():
    fine = [nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), PartNorm(4, 2), nn.Linear(2, 2)]
    model = nn.Sequential(_Net(), *fine)
    assert can_group(model) == ""
    assert can_group(group_batch_norms(model)) == ""


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


@pytest.mark.parametrize("dims", [1, 2])
def test_sync_norm_alone_is_batch_norm(dims):
    layer, reference = _noisy(SyncNorm(CHANNELS)), _noisy(_batch_norm(dims))
    inputs = _samples(6, dims)
    assert torch.equal(layer(inputs), reference(inputs))
    assert torch.equal(layer.running_var, reference.running_var)


def _batch_norm(dims: int | str, **options) -> nn.Module:
    return PLAIN[dims](CHANNELS, **options)


def _samples(n: int, dims: int | str, seed: int = 0) -> Tensor:
    """The same for the same arguments, so that a worker can make its slice by itself. Means and scales differ by channel."""
    made = torch.randn(n, CHANNELS, *SIDES[dims], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    scale = torch.arange(1, CHANNELS + 1).view(-1, *[1] * len(SIDES[dims]))
    return made * scale + 3 * scale


def _noisy(layer: nn.Module, seed: int = 7) -> nn.Module:
    """`layer` in float64 with weights and running statistics that are not all zeros and ones."""
    generator = torch.Generator().manual_seed(seed)
    for value in layer.double().state_dict().values():
        if value.is_floating_point():
            value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
    return layer
