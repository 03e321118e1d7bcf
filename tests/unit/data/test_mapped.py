import ctypes
import mmap

import numpy as np
import pytest
import torch

from paceline.data import loaders, mapped
from paceline.data.loaders import Arrays, Resident, Streaming, make_loader
from paceline.data.mapped import Rows, is_mapped

CPU = torch.device("cpu")


@pytest.fixture
def values():
    return np.arange(40 * 3000, dtype=np.int32).reshape(40, 3000)  # a row has 12,000 bytes: 3 pages or 4


@pytest.fixture
def file(tmp_path, values):
    np.save(tmp_path / "values.npy", values)
    return tmp_path / "values.npy"


def load(file, mode="r"):
    return Arrays((np.load(file, mmap_mode=mode),)).tensors[0]


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_a_mapped_file_is_known_by_its_address(file, mode):
    assert is_mapped(load(file, mode))
    assert is_mapped(load(file, mode)[7:9])


def test_other_memory_is_not_a_mapped_file(file, values):
    mapping = load(file)
    assert not is_mapped(torch.from_numpy(np.load(file)))
    assert not is_mapped(mapping.clone())
    assert not is_mapped(torch.zeros(10_000).share_memory_())
    assert not is_mapped(torch.zeros(0))
    assert not is_mapped(torch.zeros(3, device="meta"))


@pytest.mark.parametrize("mode", ["r", "c"])
def test_rows_are_those_of_the_array(file, mode, values):
    rows = Rows(load(file, mode))
    for wanted in ([3, 39, 0, 3], [5], []):
        assert rows[wanted].numpy().tolist() == values[wanted].tolist()


def test_all_pages_of_a_batch_are_asked_for(file, monkeypatch):
    tensor, given = load(file), []
    real = mapped._load_madvise()

    def madvise(page, size, advice):
        assert real(page, size, advice) == 0
        given.append((page - tensor.data_ptr(), size))

    monkeypatch.setattr(mapped, "_load_madvise", lambda: madvise)
    Rows(tensor)[[2, 9]]
    for row, (begin, size) in zip([2, 9], given, strict=True):
        assert (tensor.data_ptr() + begin) % mmap.PAGESIZE == 0
        assert row * 12_000 - mmap.PAGESIZE < begin <= row * 12_000
        assert begin + size == (row + 1) * 12_000


def test_a_loader_process_makes_batches_in_shared_memory(file, monkeypatch):
    assert not Rows(load(file))[[1, 2]].is_shared()
    monkeypatch.setattr(mapped, "get_worker_info", lambda: "in a loader process")
    batch = Rows(load(file))[[1, 2]]
    assert batch.is_shared()
    assert batch.tolist() == load(file)[1:3].tolist()


@pytest.mark.parametrize("which", ["small rows", "columns", "memory"])
def test_no_advice_where_it_does_not_help(which, file, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("madvise was called"))
    mapping = load(file)
    tensor = {"small rows": mapping.view(-1, 1000), "columns": mapping[:, ::2], "memory": mapping.clone()}[which]
    assert Rows(tensor)[[1, 2]].tolist() == tensor[1:3].tolist()


def test_a_large_mapped_file_is_streamed_on_a_cpu(file, monkeypatch):
    small = Arrays((np.load(file, mmap_mode="r"),))
    in_memory = Arrays((np.load(file),))

    def kind(data, given="auto"):
        return type(make_loader(data, given, None, CPU, 0, 0))

    assert kind(small) is Resident
    monkeypatch.setattr(loaders, "_MANY_BYTES", small.nbytes)
    assert kind(small) is Streaming
    assert kind(small, "resident") is Resident
    assert kind(in_memory) is Resident


def test_streamed_rows_are_those_of_memory(file):
    order = [np.array([4, 0, 39]), np.array([7])]
    batches = [
        [batch[0].tolist() for batch in make_loader(data, "streaming", None, CPU, 0, 0).batches(order, 0)]
        for data in (Arrays((np.load(file, mmap_mode="r"),)), Arrays((np.load(file),)))
    ]
    assert batches[0] == batches[1]
