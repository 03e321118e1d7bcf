"""Where Fashion-MNIST is found, in which order, and what is refused. Most tests use a stand-in of 20 + 10 images."""

import gzip
import hashlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from paceline.data import fashion_mnist
from paceline.data.fashion_mnist import TRAIN_IMAGES, TRAIN_LABELS, VALIDATION_IMAGES, VALIDATION_LABELS, find, load, verify
from paceline.errors import DataError, UsageError

FILES = (TRAIN_IMAGES, TRAIN_LABELS, VALIDATION_IMAGES, VALIDATION_LABELS)
FULL = Path("/usr/share/datasets/fashion-mnist")


def idx_bytes(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + np.array(values.shape, dtype=">u4").tobytes() + values.astype(np.uint8).tobytes()


def contents() -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    return {
        TRAIN_IMAGES: idx_bytes(rng.integers(0, 256, (20, 28, 28))),
        TRAIN_LABELS: idx_bytes(np.arange(20) % 10),
        VALIDATION_IMAGES: idx_bytes(rng.integers(0, 256, (10, 28, 28))),
        VALIDATION_LABELS: idx_bytes(np.arange(10)),
    }


def fill(folder: Path, files: tuple[str, ...] = FILES, packed: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        content = contents()[file]
        (folder / (f"{file}.gz" if packed else file)).write_bytes(gzip.compress(content) if packed else content)
    return folder


class Mirror(ThreadingHTTPServer):
    daemon_threads = False  # so that closing the server joins its threads

    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> Path:
    """`fashion-mnist` is the stand-in, its cache and system folders are empty ones in `tmp_path`, its only mirror is closed."""
    source = replace(
        fashion_mnist.SOURCES["fashion-mnist"],
        train_size=20,
        validation_size=10,
        sha256={file: hashlib.sha256(content).hexdigest() for file, content in contents().items()},
        mirrors=("http://127.0.0.1:1/",),
    )
    monkeypatch.setitem(fashion_mnist.SOURCES, "fashion-mnist", source)
    monkeypatch.setattr(fashion_mnist, "_SYSTEM_FOLDER", tmp_path / "system")
    monkeypatch.setattr("paceline.data.download._BACK_OFF_S", 0.001)
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path


@pytest.fixture
def mirror(tiny, monkeypatch) -> Iterator[Path]:
    """A mirror that works; yields the folder that it serves."""
    folder = fill(tiny / "mirror")
    with Mirror(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        source = replace(fashion_mnist.SOURCES["fashion-mnist"], mirrors=(server.url(),))
        monkeypatch.setitem(fashion_mnist.SOURCES, "fashion-mnist", source)
        yield folder
        server.shutdown()
        thread.join()


def test_load_gives_what_the_files_hold(tiny):
    data = load("fashion-mnist", fill(tiny / "given"))
    assert (data.train_images.shape, data.train_images.dtype) == ((20, 1, 28, 28), np.uint8)
    assert (data.validation_images.shape, data.validation_images.dtype) == ((10, 1, 28, 28), np.uint8)
    assert data.train_labels.dtype == data.validation_labels.dtype == np.int64
    assert data.train_labels.tolist() == [*range(10), *range(10)]
    assert data.validation_labels.tolist() == [*range(10)]
    assert data.train_images.tobytes() == contents()[TRAIN_IMAGES][16:]
    assert data.validation_images.tobytes() == contents()[VALIDATION_IMAGES][16:]
    assert (data.name, data.classes) == ("fashion-mnist", 10)
    assert data.where == f"fashion-mnist (20 + 10) from {tiny / 'given'}"


@pytest.mark.parametrize("layout", [".", "fashion-mnist", "FashionMNIST/raw"])
@pytest.mark.parametrize("packed", [True, False])
def test_every_layout_is_accepted(tiny, layout, packed):
    folder = fill(tiny / "given" / layout, packed=packed)
    assert find("fashion-mnist", tiny / "given") == folder
    assert load("fashion-mnist", tiny / "given").train_images.shape == (20, 1, 28, 28)


def test_the_order_is_given_then_cache_then_system(tiny):
    given = tiny / "given"
    assert find("fashion-mnist", given) is None
    fill(tiny / "system")
    assert find("fashion-mnist", given) == tiny / "system"
    fill(tiny / "cache")
    assert find("fashion-mnist", given) == tiny / "cache"
    fill(given)
    assert find("fashion-mnist", given) == given
    assert find("fashion-mnist") == tiny / "cache"


def test_the_cache_folder_follows_the_environment(tiny, monkeypatch):
    monkeypatch.delenv("PACELINE_DATA")
    monkeypatch.setenv("HOME", str(tiny / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    at_home = fill(tiny / "home" / ".cache" / "paceline" / "fashion-mnist")
    assert find("fashion-mnist") == at_home
    monkeypatch.setenv("XDG_CACHE_HOME", str(tiny / "xdg"))
    assert find("fashion-mnist") is None
    in_xdg = fill(tiny / "xdg" / "paceline" / "fashion-mnist")
    assert find("fashion-mnist") == in_xdg


def test_a_damaged_file_in_the_given_folder_is_not_replaced_by_other_data(tiny):
    fill(tiny / "system")
    damaged = fill(tiny / "given") / f"{TRAIN_LABELS}.gz"
    damaged.write_bytes(damaged.read_bytes()[:-3])
    with pytest.raises(DataError, match="damaged") as caught:
        load("fashion-mnist", tiny / "given")
    assert str(damaged) in str(caught.value)


def test_an_incomplete_given_folder_is_not_replaced_by_other_data(tiny):
    fill(tiny / "system")
    fill(tiny / "given", FILES[:3])
    assert find("fashion-mnist", tiny / "given") is None
    with pytest.raises(DataError, match=VALIDATION_LABELS):
        load("fashion-mnist", tiny / "given")


def test_a_damaged_cache_is_an_error_too(tiny):
    fill(tiny / "system")
    damaged = fill(tiny / "cache") / f"{TRAIN_IMAGES}.gz"
    damaged.write_bytes(b"")
    with pytest.raises(DataError, match="damaged"):
        load("fashion-mnist")


@pytest.mark.parametrize(
    ("file", "values", "complaint"),
    [
        (TRAIN_IMAGES, np.zeros((19, 28, 28)), r"shape \(19, 28, 28\)"),
        (TRAIN_IMAGES, np.zeros((20, 28, 27)), r"shape \(20, 28, 27\)"),
        (VALIDATION_IMAGES, np.zeros((10, 784)), r"shape \(10, 784\)"),
        (TRAIN_LABELS, np.zeros(10), r"shape \(10,\)"),
        (VALIDATION_LABELS, np.full(10, 10), "holds label 10"),
    ],
)
def test_complete_files_with_the_wrong_content_are_refused(tiny, file, values, complaint):
    path = fill(tiny / "given") / f"{file}.gz"
    path.write_bytes(gzip.compress(idx_bytes(values)))
    with pytest.raises(DataError, match=complaint) as caught:
        load("fashion-mnist", tiny / "given")
    assert str(path) in str(caught.value)


def test_without_data_and_network_the_error_lists_every_way_to_get_it(tiny):
    with pytest.raises(DataError) as caught:
        load("fashion-mnist")
    text = str(caught.value)
    assert "\n" not in text
    for way in (
        "127.0.0.1:1",
        "dataset-fashion-mnist",
        "paceline data fetch fashion-mnist",
        "--data-dir",
        "fashion-mnist-mini",
    ):
        assert way in text


@pytest.mark.parametrize("chosen", ["given", None])
def test_it_is_downloaded_to_the_given_folder_or_the_cache(tiny, mirror, chosen):
    data = load("fashion-mnist", tiny / chosen if chosen else None)
    assert data.where.endswith(str(tiny / (chosen or "cache")))
    assert all(verdict.ok for verdict in verify(tiny / (chosen or "cache")))


def test_fetch_completes_a_folder_and_keeps_what_is_right(tiny, mirror):
    folder = fill(tiny / "given" / "FashionMNIST" / "raw", (TRAIN_IMAGES,), packed=False)
    fill(folder, (TRAIN_LABELS,))
    (folder / VALIDATION_LABELS).write_bytes(b"damaged")
    seen = set()
    assert fashion_mnist.fetch_fashion_mnist(tiny / "given", lambda file, done, total: seen.add(file)) == folder
    assert seen == {f"{VALIDATION_IMAGES}.gz", f"{VALIDATION_LABELS}.gz"}
    assert load("fashion-mnist", tiny / "given").validation_labels.tolist() == [*range(10)]
    assert not list(folder.glob("*.part"))


def test_a_mirror_with_other_content_is_refused(tiny, mirror):
    (mirror / f"{TRAIN_LABELS}.gz").write_bytes(gzip.compress(idx_bytes(np.zeros(20))))
    with pytest.raises(DataError, match="SHA-256"):
        load("fashion-mnist")
    assert not (tiny / "cache" / f"{TRAIN_LABELS}.gz").exists()


def test_verify_tells_right_wrong_damaged_and_missing_apart(tiny):
    folder = fill(tiny / "given", FILES[:3])
    (folder / f"{TRAIN_LABELS}.gz").write_bytes(gzip.compress(idx_bytes(np.zeros(20))))
    (folder / f"{VALIDATION_IMAGES}.gz").write_bytes((folder / f"{VALIDATION_IMAGES}.gz").read_bytes()[:-1])
    verdicts = verify(folder)
    assert [(file, ok) for file, ok, _ in verdicts] == [(f"{file}.gz", file == TRAIN_IMAGES) for file in FILES]
    assert "published" in verdicts[1].detail
    assert "complete gzip" in verdicts[2].detail
    assert verdicts[3].detail == "missing"


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'fashion-mnist'"):
        load("fashon-mnist")


def test_mini_ships_and_needs_nothing(tiny):
    data = load("fashion-mnist-mini", tiny / "given")
    assert data.train_images.shape == (6_000, 1, 28, 28)
    assert data.validation_images.shape == (1_000, 1, 28, 28)
    assert np.bincount(data.train_labels).tolist() == [600] * 10
    assert np.bincount(data.validation_labels).tolist() == [100] * 10
    assert data.where == "fashion-mnist-mini (6,000 + 1,000), shipped with paceline"
    folder = find("fashion-mnist-mini")
    assert folder is not None
    assert all(verdict.ok for verdict in verify(folder, "fashion-mnist-mini"))
    assert "Zalando SE" in (folder / "LICENSE").read_text()


def full_data() -> Path:
    if not (FULL / f"{TRAIN_IMAGES}.gz").is_file():
        pytest.skip(f"no {FULL}: run tools/install_system_packages.sh")
    return FULL


@pytest.mark.full_data
def test_the_full_set_is_the_published_one():
    folder = full_data()
    assert [verdict.ok for verdict in verify(folder)] == [True] * 4
    data = load("fashion-mnist", folder)
    assert data.where == f"fashion-mnist (60,000 + 10,000) from {folder}"
    assert np.bincount(data.train_labels).tolist() == [6_000] * 10
    assert np.bincount(data.validation_labels).tolist() == [1_000] * 10


@pytest.mark.full_data
def test_mini_is_the_first_of_each_class_in_order():
    full, mini = load("fashion-mnist", full_data()), load("fashion-mnist-mini")
    for images, labels, mini_images, mini_labels, count in (
        (full.train_images, full.train_labels, mini.train_images, mini.train_labels, 600),
        (full.validation_images, full.validation_labels, mini.validation_images, mini.validation_labels, 100),
    ):
        earlier = np.zeros(len(labels), dtype=int)  # how many of its class come before each sample
        for label in range(10):
            earlier[labels == label] = np.arange(np.count_nonzero(labels == label))
        np.testing.assert_array_equal(mini_labels, labels[earlier < count])
        np.testing.assert_array_equal(mini_images, images[earlier < count])


def test_a_data_dir_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="is a file: it must be a folder"):
        fashion_mnist.load("fashion-mnist", tmp_path / "file")
