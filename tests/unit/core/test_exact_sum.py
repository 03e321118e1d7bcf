"""The exact sum against whole numbers: the same bits for every order of the parts and every dealing of them to workers."""

import itertools
import math
import random
import threading
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.core import exact_sum as reduce
from paceline.core.exact_sum import MOST_PARTS, Done, ExactReducer, Workers
from paceline.errors import UsageError

Grads = Sequence[Tensor | None]


TINY, NORMAL, HUGE = 2.0**-149, 2.0**-126, torch.finfo(torch.float32).max


SHAPES = [(), (0,), (1,), (5,), (2, 3), (0, 4), (3, 1, 2)]


@st.composite
def sums(draw: st.DrawFn) -> tuple[list[list[Tensor]], int]:
    """The gradients of every part, and a seed for all that must not matter."""
    seed = draw(st.integers(0, 2**32))
    parts = draw(st.one_of(st.integers(1, 6), st.integers(1, 300)))
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4 if parts > 6 else 8))
    special = [0.0, -0.0, TINY, -TINY, 3 * TINY, NORMAL - TINY, -NORMAL, HUGE, -HUGE, 1.0, 1.0 - 2**-24, -(2.0**36), 2.0**18]
    values = torch.tensor(special, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    def tensor(shape: Sequence[int], tensor_scale: int) -> Tensor:
        kind = number(0, 4)
        if kind == 0:
            return values[torch.randint(len(values), tuple(shape), generator=generator)]
        if kind == 1:
            return torch.zeros(shape)
        spread = number(0, 2) * number(0, 60)  # within a tensor
        exponents = tensor_scale + number(-40, 41) + torch.randint(-spread, spread + 1, tuple(shape), generator=generator)
        normal = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
        return (normal * 2.0 ** exponents.double()).clamp(-HUGE, HUGE).float()

    scales = [number(-149, 128) for _ in shapes]
    return [[tensor(shape, scale) for shape, scale in zip(shapes, scales, strict=True)] for _ in range(parts)], seed


@settings(max_examples=40, deadline=None)
@given(sums())
def test_neither_order_nor_dealing_nor_chunks_matter_and_the_sum_is_that_of_the_digits(drawn):
    parts, seed = drawn
    alone = _sum(parts)
    for result, expected in zip(alone, _expected(parts), strict=True):
        assert _bits(result) == _bits(expected)
    chance = random.Random(seed)
    for _ in range(2):
        shuffled = chance.sample(parts, len(parts))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reduce, "_CHUNK", chance.choice([1, 6, 11, 1 << 22]))
            patch.setattr(reduce, "_CACHED", chance.choice([1, 4, 1 << 16]))
            results = _sum_on(_deal(shuffled, chance.randint(1, min(4, len(parts))), chance), len(parts))
        for result in results:
            assert [_bits(each) for each in result] == [_bits(each) for each in alone]


@settings(max_examples=30, deadline=None)
@given(sums())
def test_the_error_is_what_the_docstring_promises(drawn):
    parts, _ = drawn
    width = _width(len(parts))
    for number, result in enumerate(_sum(parts)):
        grads = [[Fraction(value) for value in part[number].flatten().tolist()] for part in parts]
        largest = max((abs(value) for part in grads for value in part), default=Fraction(0))
        cut = max(Fraction(2) ** -112, largest / 2 ** (2 * width))
        for place, total in enumerate(result.flatten().tolist()):
            true = sum(part[place] for part in grads)
            if math.isinf(total):
                assert abs(true) + len(parts) * cut >= Fraction(HUGE)
                continue
            rounding = max(abs(Fraction(total)) / 2**24, Fraction(TINY) / 2)
            assert abs(Fraction(total) - true) <= len(parts) * cut + rounding


def test_37_bits_of_the_largest_value_are_kept_for_256_parts():
    for exponent in (*range(-57, 60, 25), 17, 18, 19):
        largest, small = 2.0**exponent, 2.0 ** (exponent - 36)
        parts = [[torch.tensor([largest, small])], *[[torch.tensor([-largest, 0.0])]] * 255]
        assert _sum([[part[0].float()] for part in parts])[0].tolist() == [-254 * largest, small]


def test_a_part_more_or_less_of_zeros_changes_nothing_but_the_width():
    parts = [[torch.tensor([1.5, -3.0, 1e-8])], [torch.tensor([1e-8, 3.0, 1e8])]]
    assert torch.equal(_sum([*parts, [torch.zeros(3)]])[0], _sum([*parts, [None]])[0])


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5, 256, 257, 300, 32768, 65535, MOST_PARTS])
def test_digits_never_overflow(parts):
    """Every value of every part as large as its digits can be, at both ends and in the middle of a float's range."""
    width = _width(parts)
    assert parts * (2 ** (3 * width) - 1) < 2**62
    assert parts * (2**width - 1) < 2**31
    for exponent in (128, width, width * 2, 1, 0, -95, -100):
        ones = math.nextafter(2.0**exponent, 0.0)  # 53 ones, of which three digits are kept
        values = torch.tensor([ones, -ones], dtype=torch.float64)
        reducer = ExactReducer([values], parts)
        reducer.add([values])
        if parts > 1:
            reducer.add([values])
            reducer._digits.div_(2, rounding_mode="trunc").mul_(parts)  # as adding `parts` times would, which takes a minute
        scale = reducer._spread_scales()
        reducer._pack(slice(0, 2), scale)
        packed = reducer._sent if parts > 1 else reduce._whole(reducer._flat, scale)
        top = max(-(-exponent // width), int(reducer._lowest_tops[0]))
        whole = int(Fraction(ones) / Fraction(2) ** ((top - 3) * width))
        assert packed.tolist() == [parts * whole, -parts * whole]
        assert packed.abs().max() < 2**62
        expected = float(parts * whole) * 2.0 ** ((top - 3) * width)
        assert reducer.finish()[0].tolist() == [expected, -expected]


def test_as_many_adds_as_parts_and_no_more():
    reducer = ExactReducer([torch.zeros(1)], 3)
    for _ in range(2):  # steps
        for _ in range(3):
            reducer.add([torch.ones(1)])
        with pytest.raises(UsageError, match="more than the 3 parts that this worker can have"):
            reducer.add([torch.ones(1)])
        assert reducer.finish()[0].item() == 3
    one_of_two = ExactReducer([torch.zeros(1)], 3, _Fakes(2).of(0))
    one_of_two.add([torch.ones(1)])
    one_of_two.add([torch.ones(1)])
    with pytest.raises(UsageError, match="more than the 2 parts that this worker can have"):  # the third is the other's
        one_of_two.add([torch.ones(1)])


def test_1024_real_adds_at_the_limit():
    ones = math.nextafter(2.0, 0.0)
    reducer = ExactReducer([torch.zeros(2, dtype=torch.float64)], 1024)
    for _ in range(1024):
        reducer.add([torch.tensor([ones, -ones], dtype=torch.float64)])
    unit = 2.0 ** -(2 * _width(1024))
    assert reducer.finish()[0].tolist() == [1024 * (2 - unit), -1024 * (2 - unit)]


def test_a_sum_beyond_the_range_is_infinite():
    big, half = torch.tensor([HUGE, -HUGE, HUGE]), torch.tensor([HUGE, -HUGE, -HUGE])
    assert _sum([[big], [half]])[0].tolist() == [math.inf, -math.inf, 0.0]
    assert _sum([[big], [half], [-big]])[0].tolist()[:2] == _sum([[big]])[0].tolist()[:2]  # on the way is no harm
    halves = [torch.full((1,), 60000.0, dtype=torch.float16)] * 2
    assert _sum([[half] for half in halves])[0].tolist() == [math.inf]
    doubles = [torch.full((1,), 1.7e308, dtype=torch.float64)] * 2
    assert _sum([[double] for double in doubles])[0].tolist() == [math.inf]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("where", [0, 3])
@pytest.mark.parametrize("chunk", [1, 1 << 22])
def test_a_value_that_is_not_finite_spoils_its_tensor_everywhere_and_no_other(poison, workers, where, chunk, monkeypatch):
    monkeypatch.setattr(reduce, "_CHUNK", chunk)
    parts = [[torch.tensor([1.0, 2.0]) * 10.0 ** (8 * n), torch.tensor(3.0), torch.tensor([4.0])] for n in range(4)]
    right = _sum(parts)
    parts[where][1] = torch.tensor(poison)
    for first, poisoned, last in _sum_on([parts[r::workers] for r in range(workers)], 4):
        assert poisoned.isnan().all()
        assert torch.equal(first, right[0])
        assert torch.equal(last, right[2])


def test_one_value_spoils_all_of_its_tensor_but_only_in_its_step():
    reducer = ExactReducer([torch.zeros(3)], 1)
    reducer.add([torch.tensor([1.0, math.nan, 1.0])])
    assert reducer.finish()[0].isnan().all()
    reducer.add([torch.ones(3)])
    assert reducer.finish()[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_keep_theirs(dtype):
    generator = torch.Generator().manual_seed(0)
    parts = [[torch.randn(50, generator=generator).to(dtype), torch.randn(3, generator=generator)] for _ in range(5)]
    first, second = _sum(parts)
    assert first.dtype == dtype
    assert second.dtype == torch.float32
    torch.testing.assert_close(first, torch.stack([part[0].double() for part in parts]).sum(0).to(dtype), rtol=1e-9, atol=1e-9)
    expected = _expected([[part[1]] for part in parts])[0]
    assert _bits(second) == _bits(expected)
    for result in _sum_on([parts[3:], parts[:3][::-1]], 5):
        assert _bits(result[0]) == _bits(first)


def test_float64_over_its_whole_range():
    for exponent in (-900, -90, -30, 0, 500, 1000, 1022):
        values = torch.tensor([2.0**exponent, -3 * 2.0 ** (exponent - 30)], dtype=torch.float64)
        assert torch.equal(_sum([[values], [values / 4]])[0], values * 1.25)


def test_the_smallest_float32_that_counts():
    reducer = ExactReducer([torch.zeros(2)], 16384)
    reducer.add([torch.tensor([2.0**-112, -(2.0**-112) * (1 - 2**-24)])])
    assert reducer.finish()[0].tolist() == [2.0**-112, 0.0]


def test_none_is_zeros_even_for_all():
    ones = [torch.ones(2), torch.ones(())]
    assert [t.tolist() for t in _sum([[None, ones[1]], ones, [ones[0], None]])] == [[2, 2], 2]
    reducer = ExactReducer(ones, 1)
    reducer.add([None, None])
    assert [t.tolist() for t in reducer.finish()] == [[0, 0], 0]


def test_minus_zero_is_zero_on_any_number_of_workers():
    parts = [[torch.tensor([-0.0])]] * 2
    assert math.copysign(1, _sum(parts)[0].item()) == 1
    assert math.copysign(1, _sum_on([parts[:1], parts[1:]], 2)[0][0].item()) == 1


def test_gradients_are_read_and_not_changed_or_kept():
    grads = [torch.randn(4, 3).t(), torch.randn(8)[::2], torch.randn(2, requires_grad=True)]
    before = [grad.clone() for grad in grads]
    versions = [grad._version for grad in grads]
    reducer = ExactReducer([torch.zeros(3, 4), torch.zeros(4), torch.zeros(2)], 2)
    reducer.add(grads)
    assert all(torch.equal(a, b) for a, b in zip(grads, before, strict=True))
    assert [grad._version for grad in grads] == versions
    with torch.no_grad():
        for grad in grads:
            grad.zero_()
    results = reducer.finish()
    for result, grad in zip(results, before, strict=True):
        assert torch.equal(result, grad.detach())
        assert result.is_contiguous()
        assert not result.requires_grad
    kept = [result.clone() for result in results]
    reducer.add([torch.ones(3, 4), torch.ones(4), torch.ones(2)])
    assert all(torch.equal(a, b) for a, b in zip(results, kept, strict=True)), "a result was written to before the next finish"
    reducer.finish()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_step_knows_nothing_of_the_one_before(workers):
    """Large values, then small ones: were tops or digits kept, the small would lose bits or gain values."""
    scales = [1e30, 1e-20, 1.0, 1.0, 1e-35, 1e10]
    steps = [[[torch.randn(7) * scale, torch.randn(2)] for _ in range(4)] for scale in scales]
    fresh = [_sum(parts) for parts in steps]
    fakes = _Fakes(workers)

    def work(rank: int) -> list[list[Tensor]]:
        reducer = ExactReducer([torch.zeros(7), torch.zeros(2)], 4, fakes.of(rank))
        results = []
        for parts in steps:
            for part in parts[rank::workers]:
                reducer.add(part)
            results.append([each.clone() for each in reducer.finish()])
        return results

    for results in _threads(work, workers):
        for result, expected in zip(results, fresh, strict=True):
            assert [_bits(each) for each in result] == [_bits(each) for each in expected]


def test_a_worker_without_a_part_joins_in():
    parts = [[torch.tensor([3e20, 1e-3])], [torch.tensor([1.0, -1e-3])]]
    for dealt, of in (([[], parts, []], 4), ([[], parts[:1]], 2)):
        alone = _sum([*dealt[1], *[[None]] * (of - len(dealt[1]))])
        for result in _sum_on(dealt, of):
            assert torch.equal(result[0], alone[0])


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_what_is_refused():
    ones = torch.ones(3)
    with pytest.raises(UsageError, match=r"^2 parts for 3 workers: an exact sum needs one or more per worker$"):
        ExactReducer([ones], 2, _Fakes(3).of(0))
    for parts in (0, -1, MOST_PARTS + 1):
        with pytest.raises(UsageError, match=rf"^{parts} parts: the exact sum takes 1 to 65,536$"):
            ExactReducer([ones], parts)
    for sparse in (ones.to_sparse(), torch.ones(2, 2).to_sparse_csr()):
        with pytest.raises(UsageError, match=r"^an exact sum cannot take sparse gradients: .*reduce fast$"):
            ExactReducer([sparse.to_dense()], 1).add([sparse])
    with pytest.raises(UsageError, match=r"^an exact sum cannot take gradients of torch.complex64: .*reduce fast$"):
        ExactReducer([ones, torch.zeros(1, dtype=torch.complex64)], 1)
    with pytest.raises(ValueError, match="zip"):
        ExactReducer([ones, ones], 1).add([ones])


def test_parameters_as_torch_hands_them_out():
    model = torch.nn.Linear(2, 1)
    reducer = ExactReducer(model.parameters(), parts=1)
    model(torch.ones(1, 2)).sum().backward()
    reducer.add([p.grad for p in model.parameters()])
    assert [grad.tolist() for grad in reducer.finish()] == [[[1, 1]], [1]]
    assert reducer.nbytes == (4 + 4) * 3 + 2 * 8 * 2
    assert ExactReducer(model.parameters(), 3, _Fakes(3).of(0)).nbytes == (4 + 4) * 3 + 2 * 8 * 2, "one part each"
    assert ExactReducer(model.parameters(), parts=2).nbytes == (8 + 4) * 3 + 2 * 8 * 2


def test_powers_of_two_are_exact():
    exponents = torch.arange(-126, 128, dtype=torch.int32)
    assert reduce._power_of_two(exponents, torch.float32).tolist() == [2.0 ** int(e) for e in exponents]
    exponents = torch.arange(-1022, 1024, dtype=torch.int32)
    assert reduce._power_of_two(exponents, torch.float64).tolist() == [2.0 ** int(e) for e in exponents]


def test_every_scale_and_its_inverse_is_a_normal_number():
    for parts in (2**k for k in range(17)):
        for dtype, most in ((torch.float32, 128), (torch.float64, 1024)):
            reducer = ExactReducer([torch.zeros(1, dtype=dtype)], parts)
            for top in (int(reducer._lowest_tops[0]), -(-most // _width(parts))):
                assert 2 - most <= (3 - top) * _width(parts) <= most - 2, "it or its inverse is not"


class _Fakes:
    """Workers that are threads: each hands in its tensor, and takes what is its from all."""

    def __init__(self, workers: int) -> None:
        self._barrier = threading.Barrier(workers, timeout=60)
        self._slots: list[Tensor] = [torch.empty(0)] * workers

    def of(self, rank: int) -> "_Fake":
        return _Fake(self, rank)

    def exchange(self, rank: int, tensor: Tensor) -> Tensor:
        self._slots[rank] = tensor.clone()
        self._barrier.wait()
        everyone = torch.stack(self._slots)
        self._barrier.wait()
        return everyone


class _Fake(Workers):
    def __init__(self, everyone: _Fakes, rank: int) -> None:
        self.size, self.rank, self._everyone = len(everyone._slots), rank, everyone

    def max(self, tensor: Tensor) -> None:
        tensor.copy_(self._everyone.exchange(self.rank, tensor).amax(0))

    def scatter(self, sent: Tensor, received: Tensor) -> Any:
        received.copy_(
            self._everyone.exchange(self.rank, sent).unflatten(1, (self.size, len(sent) // self.size))[:, self.rank].flatten()
        )
        return Done()

    def gather(self, share: Tensor, everything: Tensor) -> Any:
        everything.copy_(self._everyone.exchange(self.rank, share).flatten())
        return Done()


def _threads(function: Callable[[int], Any], count: int) -> list[Any]:
    results: list[Any] = [None] * count

    def run(rank: int) -> None:
        results[rank] = function(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None not in results, "a worker failed: see above"
    return results


def _sum_on(dealt: Sequence[Sequence[Grads]], parts: int) -> list[list[Tensor]]:
    """Every worker's result, where worker r adds dealt[r]."""
    fakes = _Fakes(len(dealt))
    like = [torch.zeros_like(grad) for grad in next(mine for mine in dealt if mine)[0]]

    def work(rank: int) -> list[Tensor]:
        reducer = ExactReducer(like, parts, fakes.of(rank))
        for part in dealt[rank]:
            reducer.add(part)
        return reducer.finish()

    return _threads(work, len(dealt))


def _sum(parts: Sequence[Grads]) -> list[Tensor]:
    like = [next(part[i] for part in parts if part[i] is not None) for i in range(len(parts[0]))]
    reducer = ExactReducer(like, len(parts))
    for part in parts:
        reducer.add(part)
    return reducer.finish()


def _deal(parts: list[Any], workers: int, chance: random.Random) -> list[list[Any]]:
    """To each worker one at least, the rest anyhow."""
    cuts = sorted(chance.sample(range(1, len(parts)), workers - 1))
    return [parts[i:j] for i, j in itertools.pairwise([0, *cuts, len(parts)])]


def _expected(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The sum as the docstring has it, in whole numbers."""
    width, results = _width(len(parts)), []
    for grads in zip(*parts, strict=True):
        rows = [grad.flatten().tolist() for grad in grads]
        exponents = [math.frexp(value)[1] for row in rows for value in row if value]
        top = max([3 - 126 // width, *(-(-exponent // width) for exponent in exponents)])
        unit = Fraction(2) ** ((top - 3) * width)
        totals = [sum(int(Fraction(value) / unit) for value in column) for column in zip(*rows, strict=True)]
        doubles = [float(_round(total) * unit) for total in totals]  # beyond a float32's range: an infinity below
        results.append(torch.tensor(doubles, dtype=torch.float64).to(torch.float32).view(grads[0].shape))
    return results


def _round(total: int) -> int:
    """To the 24 bits of a float32, half to even."""
    unit = 2 ** max(0, total.bit_length() - 24)
    return round(Fraction(total, unit)) * unit


def _width(parts: int) -> int:
    """The widest digits of which three, `parts` times over, stay below 2^62."""
    return max(width for width in range(1, 31) if parts * 2 ** (3 * width) <= 2**62)


def _bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
