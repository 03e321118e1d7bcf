"""Parts dealt to any number of workers, in any passes: every sample once, and each part with statistics of its own."""

import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from harness.training import ALONE
from paceline.config import Config
from paceline.core.deal import Pass, cut_epoch, cut_step, deal_parts
from paceline.core.norms import PartNorm, group_batch_norms
from paceline.core.sampler import Sampler
from paceline.core.statistics import Statistics
from paceline.core.sync_norm import SyncNorm
from paceline.errors import UsageError
from paceline.training.grouping import choose_grouping


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As real workers have it: bits depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@st.composite
def dealings(draw: st.DrawFn) -> tuple[int, int, int, bool]:
    """Parts, workers, parts at once, whole groups: as many workers as there are parts or, where they stay whole, groups."""
    parts = draw(st.integers(1, 40))
    at_once = draw(st.integers(1, parts))
    whole = draw(st.booleans())
    return parts, draw(st.integers(1, -(-parts // at_once) if whole else parts)), at_once, whole


@given(dealings())
def test_every_part_is_dealt_once_in_order_and_everybody_has_some(dealing):
    parts, workers, at_once, whole = dealing
    dealt = [deal_parts(parts, workers, rank, at_once, whole) for rank in range(workers)]
    assert [part for groups in dealt for group in groups for part in group] == list(range(parts))
    for groups in dealt:
        assert groups
        assert all(1 <= len(group) <= at_once for group in groups)
        assert all(len(group) == at_once for group in groups[:-1])
    counts = [len(groups) if whole else sum(map(len, groups)) for groups in dealt]
    assert max(counts) - min(counts) <= 1


@given(dealings())
def test_whole_groups_do_not_depend_on_the_workers(dealing):
    parts, workers, at_once, _ = dealing
    workers = min(workers, -(-parts // at_once))
    alone = deal_parts(parts, 1, 0, at_once, True)
    assert [group for rank in range(workers) for group in deal_parts(parts, workers, rank, at_once, True)] == alone


@st.composite
def plans(draw: st.DrawFn) -> tuple[Sampler, list[list[range]], int, bool]:
    """A sampler, every worker's groups, accumulate, one_pass."""
    parts, workers, at_once, whole = draw(dealings())
    part_batch = draw(st.integers(1, 9))
    samples = parts * part_batch * draw(st.integers(1, 3)) + draw(st.integers(0, parts * part_batch))
    sampler = Sampler(samples, parts * part_batch, parts, draw(st.integers(0, 99)))
    groups = [deal_parts(parts, workers, rank, at_once, whole) for rank in range(workers)]
    return sampler, groups, draw(st.integers(1, 5)), draw(st.booleans())


@settings(deadline=None)
@given(plans())
def test_all_workers_passes_hold_every_sample_of_a_step_once(plan):
    sampler, everyone, accumulate, one_pass = plan
    order = sampler.order(0)
    for step in range(sampler.cut(0).steps):
        bounds = sampler.part_bounds(0, step)
        passes = [item for groups in everyone for item in cut_step(bounds, order, groups, accumulate, one_pass)]
        visited = np.concatenate([item.samples for item in passes])
        assert sorted(visited) == sorted(order[bounds[0] : bounds[-1]])
        assert [part for item in passes if item.last for part in item.parts] == list(range(sampler.parts))


@settings(deadline=None)
@given(plans(), st.integers(0, 2))
def test_an_epoch_is_its_steps(plan, first):
    sampler, everyone, accumulate, one_pass = plan
    order, count = sampler.order(2), sampler.cut(2).steps
    for groups in everyone:
        for steps in (range(min(first, count), count), range(max(0, count - first))):
            planned = cut_epoch(sampler, 2, steps, {sampler.parts: groups}.__getitem__, accumulate, one_pass)
            expected = [cut_step(sampler.part_bounds(2, step), order, groups, accumulate, one_pass) for step in steps]
            assert [_plain(passes) for passes in planned] == [_plain(passes) for passes in expected]


@settings(deadline=None)
@given(plans())
def test_the_passes_of_a_worker(plan):
    sampler, everyone, accumulate, one_pass = plan
    order = sampler.order(1)
    for step in range(sampler.cut(1).steps):
        bounds = sampler.part_bounds(1, step)
        sizes = np.diff(bounds)
        units = [_units(cut_step(bounds, order, groups, accumulate, one_pass)) for groups in everyone]
        micros = {len(items) for mine in units for items in mine}
        assert len(micros) == 1, "every worker and part has the same number of micro-batches"
        assert 1 <= micros.pop() <= accumulate
        for groups, mine in zip(everyone, units, strict=True):
            for items in mine:
                parts, here = items[0].parts, sizes[items[0].parts.start : items[0].parts.stop]
                assert [item.micro for item in items] == list(range(len(items)))
                assert [item.last for item in items] == [False] * (len(items) - 1) + [True]
                assert set(parts) <= set(groups[items[0].group])
                if one_pass or len({int(sizes[part]) for part in groups[items[0].group]}) == 1:
                    assert parts == groups[items[0].group]
                else:
                    assert len(parts) == 1
                for item in items:
                    assert len(item.samples) >= len(parts) * min(2, sizes.min())
                if len(set(here)) == 1:
                    for place, part in enumerate(parts):
                        dealt = np.concatenate([item.samples[place :: len(parts)] for item in items])
                        assert dealt.tolist() == order[bounds[part] : bounds[part + 1]].tolist()


@given(st.integers(1, 9), st.integers(1, 9))
def test_as_many_micro_batches_as_asked_for_while_each_has_two_samples(part_batch, accumulate):
    sampler = Sampler(3 * part_batch, 3 * part_batch, 3, 0)
    passes = cut_step(sampler.part_bounds(0, 0), sampler.order(0), [range(1, 2)], accumulate)
    assert len(passes) == max(1, min(accumulate, part_batch // 2))
    sizes = [len(item.samples) for item in passes]
    assert max(sizes) - min(sizes) <= 1


def test_passes_worked_out_by_hand():
    sampler = Sampler(11, 8, 4, 0)  # steps of 6 and 5 samples: parts of 1, 2, 1, 2 and of 1, 1, 1, 2
    order = np.arange(100, 111)
    groups = [range(0, 2), range(2, 4)]
    assert _plain(cut_step(sampler.part_bounds(0, 0), order, groups, 2)) == [
        (0, [0], 0, True, [100]),
        (0, [1], 0, True, [101, 102]),
        (1, [2], 0, True, [103]),
        (1, [3], 0, True, [104, 105]),
    ]
    assert _plain(cut_step(sampler.part_bounds(0, 1), order, groups, 2)) == [
        (0, [0, 1], 0, True, [106, 107]),
        (1, [2], 0, True, [108]),
        (1, [3], 0, True, [109, 110]),
    ]
    assert _plain(cut_step(sampler.part_bounds(0, 1), order, [range(4)], 1, one_pass=True)) == [
        (0, [0, 1, 2, 3], 0, True, [106, 107, 108, 109, 110])
    ]
    sampler = Sampler(8, 8, 2, 0)
    assert _plain(cut_step(sampler.part_bounds(0, 0), order, [range(2)], 2)) == [
        (0, [0, 1], 0, False, [100, 104, 101, 105]),
        (0, [0, 1], 1, True, [102, 106, 103, 107]),
    ]


def _units(passes: Sequence[Pass]) -> list[list[Pass]]:
    """Those of the same parts together."""
    units: dict[range, list[Pass]] = {}
    for item in passes:
        units.setdefault(item.parts, []).append(item)
    return list(units.values())


def _plain(passes: Sequence[Pass]) -> list[Any]:
    return [(item.group, list(item.parts), item.micro, item.last, item.samples.tolist()) for item in passes]


class _OddNorm(nn.BatchNorm1d):
    pass


@pytest.mark.parametrize(
    ("model", "options", "parts", "workers", "expected"),
    [
        (nn.BatchNorm1d(2), {}, 8, 2, (4, "together", False)),
        (nn.BatchNorm1d(2), {}, 7, 2, (4, "together", False)),
        (nn.BatchNorm1d(2), {}, 4, 4, (1, "one per worker", False)),
        (nn.BatchNorm1d(2), {"reduce": "exact"}, 4, 4, (1, "one per worker", False)),
        (nn.BatchNorm1d(2), {"parts_at_once": 1}, 4, 4, (1, "one per worker", False)),
        (nn.BatchNorm1d(2), {"parts_at_once": 1}, 4, 3, (1, "in turn", False)),
        (nn.BatchNorm1d(2), {"parts_at_once": 3}, 8, 2, (3, "3 at once", False)),
        (nn.BatchNorm1d(2), {"parts_at_once": 3}, 8, 5, (3, "3 at once", False)),
        (nn.BatchNorm1d(2), {"parts_at_once": 3, "reduce": "exact"}, 8, 3, (3, "3 at once", False)),
        (nn.BatchNorm1d(2), {"reduce": "exact"}, 8, 2, (1, "in turn, for exact sums", False)),
        (nn.Sequential(_OddNorm(2)), {}, 8, 2, (1, "in turn: 0 is a _OddNorm", False)),
        (_OddNorm(2), {}, 8, 2, (1, "in turn: the model is a _OddNorm", False)),
        (nn.Sequential(nn.Dropout(0.1)), {}, 8, 2, (1, "in turn: layer 0 draws random numbers", False)),
        (nn.Dropout2d(0.1), {}, 8, 2, (1, "in turn: the model draws random numbers", False)),
        (nn.RReLU(), {}, 8, 2, (1, "in turn: the model draws random numbers", False)),
        (nn.MultiheadAttention(2, 1, dropout=0.1), {}, 8, 2, (1, "in turn: the model draws random numbers", False)),
        (nn.MultiheadAttention(2, 1), {}, 8, 2, (4, "together", False)),
        (nn.Dropout(0.0), {}, 8, 2, (4, "together", False)),
        (nn.Dropout(0.1), {"parts_at_once": 2}, 8, 2, (2, "2 at once", False)),
        (nn.Sequential(SyncNorm(2)), {}, 8, 3, (3, "together: one norm over the whole step", True)),
        (nn.Sequential(nn.SyncBatchNorm(2)), {"parts_at_once": 3}, 8, 3, (3, "together: one norm over the whole step", True)),
        (SyncNorm(2), {"parts_at_once": 1}, 3, 3, (1, "together: one norm over the whole step", True)),
    ],
)
def test_grouping(model, options, parts, workers, expected):
    grouping = choose_grouping(model, Config(**options), parts, workers)
    assert (grouping.at_once, grouping.why, grouping.one_pass) == expected


@pytest.mark.parametrize(
    ("model", "options", "parts", "workers", "message"),
    [
        (
            nn.Sequential(SyncNorm(2)),
            {"reduce": "exact"},
            8,
            2,
            "--reduce exact: layer 0 takes its statistics over all workers, by float sums that depend on their number;"
            " use plain batch norm (norm=batch or part), or --reduce fast",
        ),
        (
            SyncNorm(2),
            {"parts_at_once": 2},
            8,
            3,
            "--parts-at-once 2: the model takes its statistics over the whole step, so a worker's 3 parts must run at once;"
            " leave --parts-at-once out",
        ),
        (
            nn.Sequential(_OddNorm(2)),
            {"parts_at_once": 2},
            8,
            2,
            "--parts-at-once 2: 0 is a _OddNorm, so parts cannot be kept apart in a pass; use --parts-at-once 1",
        ),
        (
            nn.BatchNorm1d(2),
            {"parts_at_once": 3, "reduce": "exact"},
            8,
            5,
            "--reduce exact with --parts-at-once 3 makes 3 groups of the 8 parts, too few for 5 workers: use at most 3 workers,"
            " or a smaller --parts-at-once",
        ),
    ],
)
def test_grouping_that_cannot_be(model, options, parts, workers, message):
    with pytest.raises(UsageError) as error:
        choose_grouping(model, Config(**options), parts, workers)
    assert str(error.value) == message


V = 5


SAMPLER = Sampler(samples=88, global_batch=40, parts=V, seed=3)  # steps of 40, 24 and 24: parts of 8, then of 4 and 5


IMAGES = torch.randn(88, 3, 2, 2, generator=torch.Generator().manual_seed(0)) * 3 + 1


def make_model() -> nn.Module:
    """Norms of every kind, one of them used twice and one with momentum None."""
    torch.manual_seed(1)
    shared = nn.BatchNorm1d(4)
    inner = nn.Sequential(PartNorm(4, part_size=3), nn.BatchNorm1d(4, momentum=None))
    silent = nn.BatchNorm1d(4, track_running_stats=False)
    return nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 4), shared, inner, silent, nn.Linear(4, 4), shared)


def train(model: nn.Module, statistics: Statistics, groups: Sequence[range], accumulate: int, epoch: int = 0) -> None:
    order = SAMPLER.order(epoch)
    model.train()
    with torch.no_grad():
        for step in range(SAMPLER.cut(epoch).steps):
            for item in cut_step(SAMPLER.part_bounds(epoch, step), order, groups, accumulate):
                statistics.use(item)
                model(IMAGES[item.samples])


@functools.cache
def expected_rows(accumulate: int, epochs: int = 1) -> list[dict[str, Tensor]]:
    """The buffers of V plain models, each trained on its part alone."""
    models = [make_model().train() for _ in range(V)]
    with torch.no_grad():
        for epoch in range(epochs):
            order = SAMPLER.order(epoch)
            for step in range(SAMPLER.cut(epoch).steps):
                bounds = SAMPLER.part_bounds(epoch, step)
                for part, model in enumerate(models):
                    for samples in np.array_split(order[bounds[part] : bounds[part + 1]], accumulate):
                        model(IMAGES[samples])
    return [dict(model.named_buffers()) for model in models]


def mean_of(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        name: rows[0][name] if name.endswith("tracked") else torch.stack([row[name].double() for row in rows]).mean(0).float()
        for name in rows[0]
    }


def all_groups(workers: int, at_once: int, whole: bool) -> list[range]:
    return [group for rank in range(workers) for group in deal_parts(V, workers, rank, at_once, whole)]


def same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("workers", "at_once", "accumulate"),
    [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 3, 1), (1, 5, 1), (5, 1, 2), (3, 2, 2), (1, 5, 2)],
)
def test_statistics_are_the_mean_of_those_of_a_model_a_part(workers, at_once, accumulate):
    rows = expected_rows(accumulate)
    model = group_batch_norms(make_model()) if at_once > 1 else make_model()
    own = dict(model.named_buffers())
    groups = all_groups(workers, at_once, whole=False)
    statistics = Statistics(model, groups, V)
    train(model, statistics, groups, accumulate)
    assert dict(model.named_buffers())["0.running_mean"] is not own["0.running_mean"]

    values, counts = statistics.gather(ALONE)
    assert values.dtype == torch.float64
    names = [name.removesuffix(".running_mean") for name in rows[0] if name.endswith("running_mean")]
    for part, row in enumerate(rows):
        expected = torch.cat([row[f"{name}.{kind}"] for name in names for kind in ("running_mean", "running_var")])
        if at_once == 1:
            assert torch.equal(values[part].float(), expected)
        else:
            torch.testing.assert_close(values[part].float(), expected)
        assert counts[part].tolist() == [int(row[f"{name}.num_batches_tracked"]) for name in names]

    statistics.average(ALONE)
    after = dict(model.named_buffers())
    assert all(after[name] is own[name] for name in own), "the model has its own buffers again"
    if at_once == 1:
        assert same_bits(after, mean_of(rows))
    else:
        torch.testing.assert_close(after, mean_of(rows))
    assert model.state_dict().keys() == make_model().state_dict().keys()
    assert [(m.parts, m.samples) for m in model.modules() if isinstance(m, PartNorm)][:1] == [(1, None)]


def test_averaging_does_not_touch_the_parts_own():
    """What is read for validation in between must not change what is trained."""
    results = []
    for look in (False, True):
        model = make_model()
        groups = all_groups(2, 1, whole=True)
        statistics = Statistics(model, groups, V)
        train(model, statistics, groups, 1)
        if look:
            statistics.average(ALONE)
            model.eval()(IMAGES)
        train(model, statistics, groups, 1, epoch=1)
        statistics.average(ALONE)
        results.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], mean_of(expected_rows(1, epochs=2)))


def test_rest_leaves_the_models_buffers_as_they_were():
    model, fresh = make_model(), make_model()
    groups = all_groups(1, 1, whole=True)
    statistics = Statistics(model, groups, V)
    train(model, statistics, groups, 1)
    statistics.rest()
    assert same_bits(dict(model.named_buffers()), dict(fresh.named_buffers()))
    own = model[0].running_mean
    item = cut_step(SAMPLER.part_bounds(0, 0), SAMPLER.order(0), groups, 1)[0]
    statistics.use(item)
    in_use = model[0].running_mean
    statistics.rest()
    statistics.use(item)
    assert model[0].running_mean is not own
    assert torch.equal(model[0].running_mean, in_use), "the same pass after a rest is pointed at its rows again"


@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_a_table_goes_to_parts_grouped_otherwise(at_once):
    """As in a checkpoint of 3 workers resumed on 2."""
    first = make_model()
    groups = all_groups(3, 1, whole=True)
    statistics = Statistics(first, groups, V)
    train(first, statistics, groups, 1)
    values, counts = statistics.gather(ALONE)
    assert len({tuple(row.tolist()) for row in values}) == V

    second = make_model() if at_once == 1 else group_batch_norms(make_model())
    others = all_groups(2, at_once, whole=False)
    moved = Statistics(second, others, V)
    moved.use(cut_step(SAMPLER.part_bounds(0, 0), SAMPLER.order(0), others, 1)[0])
    moved.scatter(values, counts)
    for table, again in zip((values, counts), moved.gather(ALONE), strict=True):
        assert torch.equal(table, again)
    assert torch.equal(second[0].running_mean.view(-1, 3)[0], values[0, :3].float()), "the rows in use are those filled"
    if at_once == 1:
        train(first, statistics, groups, 1, epoch=1)
        train(second, moved, others, 1, epoch=1)
        assert torch.equal(statistics.gather(ALONE)[0], moved.gather(ALONE)[0])


def test_each_worker_fills_its_own_rows_of_the_table():
    whole, groups = make_model(), all_groups(1, 1, whole=True)
    statistics = Statistics(whole, groups, V)
    train(whole, statistics, groups, 1)
    values, counts = statistics.gather(ALONE)
    for rank in range(3):
        model, mine = make_model(), deal_parts(V, 3, rank, 1, whole_groups=True)
        alone = Statistics(model, mine, V)
        train(model, alone, mine, 1)
        parts = [part for group in mine for part in group]
        others = [part for part in range(V) if part not in parts]
        here, counted = alone.gather(ALONE)
        assert torch.equal(here[parts], values[parts])
        assert torch.equal(counted[parts], counts[parts])
        assert not here[others].any()
        assert not counted[others].any()


def test_names_are_those_of_buffers_with_rows():
    model = make_model()
    statistics = Statistics(model, [range(2)], 2)
    expected = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    assert statistics.names(model) == expected
    assert "7.running_mean" in expected, "by both names of a layer used twice"
    assert not any(name.startswith("5.") for name in expected)
    root = nn.BatchNorm1d(2)
    assert Statistics(root, [range(1)], 1).names(root) == {"running_mean", "running_var", "num_batches_tracked"}


@pytest.mark.parametrize(
    "model", [nn.Linear(3, 2), nn.Sequential(nn.GroupNorm(1, 4)), nn.BatchNorm1d(3, track_running_stats=False)]
)
def test_models_without_statistics(model):
    before = copy.deepcopy(model.state_dict())
    statistics = Statistics(model, [range(3)], 3)
    statistics.use(Pass(0, range(3), 0, True, np.arange(6)))
    values, counts = statistics.gather(ALONE)
    assert values.shape == counts.shape == (3, 0)
    statistics.scatter(values, counts)
    statistics.average(ALONE)
    assert statistics.names(model) == set()
    assert same_bits(model.state_dict(), before)


def test_a_norm_over_all_workers_keeps_its_own():
    model = nn.Sequential(SyncNorm(2), nn.BatchNorm1d(2))
    statistics = Statistics(model, [range(2)], 2)
    assert {name.partition(".")[0] for name in statistics.names(model)} == {"1"}


def test_minus_zero_is_zero_in_the_table():
    model = nn.BatchNorm1d(1)
    model.running_mean.fill_(-0.0)
    values, _ = Statistics(model, [range(1)], 1).gather(ALONE)
    assert not values.signbit().any()  # as it would be where another worker adds its zero
