"""Fashion-MNIST (Xiao, Rasul, Vollgraf 2017, arXiv:1708.07747): the full set, and a small subset that ships with Paceline.

`fashion-mnist` is searched for in the user's folder, in the cache folder and where Debian's package installs it, and is
downloaded if none of them has it. `fashion-mnist-mini` is the first 600 training and 100 validation images of each class, in
their original order (`tools/make_mini.py`); it needs no network.

Data is never replaced silently: the first folder that has the files is used, a damaged file in it is an error, and
`ImageData.where` says which folder it was.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.data.download import content_sha256, fetch
from paceline.data.idx import read_idx
from paceline.errors import DataError, unknown


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageData:
    """A data set in memory; images are uint8 of shape (N, 1, 28, 28), labels int64 of shape (N,)."""

    name: str
    where: str
    """For the user: which data, how much of it, and where it came from."""
    classes: int
    train_images: npt.NDArray[np.uint8]
    train_labels: npt.NDArray[np.int64]
    validation_images: npt.NDArray[np.uint8]
    validation_labels: npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A built-in data set: its size, checksums and download addresses."""

    train_size: int
    validation_size: int
    sha256: Mapping[str, str]
    """SHA-256 of the decompressed content of each of the four files."""
    mirrors: tuple[str, ...]
    """Where to download the files; empty for a set that ships with the package."""

    @property
    def size(self) -> str:
        return f"{self.train_size:,} + {self.validation_size:,}"

    @property
    def ships(self) -> bool:
        return not self.mirrors


class Verdict(NamedTuple):
    """What `verify` found for one file."""

    file: str
    ok: bool
    detail: str


TRAIN_IMAGES = "train-images-idx3-ubyte"
TRAIN_LABELS = "train-labels-idx1-ubyte"
VALIDATION_IMAGES = "t10k-images-idx3-ubyte"
VALIDATION_LABELS = "t10k-labels-idx1-ubyte"

SOURCES: dict[str, Source] = {
    "fashion-mnist": Source(
        train_size=60_000,
        validation_size=10_000,
        sha256=MappingProxyType(
            {
                TRAIN_IMAGES: "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                TRAIN_LABELS: "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                VALIDATION_IMAGES: "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                VALIDATION_LABELS: "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            }
        ),
        mirrors=(
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        ),
    ),
    "fashion-mnist-mini": Source(
        train_size=6_000,
        validation_size=1_000,
        sha256=MappingProxyType(
            {
                TRAIN_IMAGES: "cf313073c7eb485392848071d5c433571d7166043e971e3345b095cc30518084",
                TRAIN_LABELS: "097b93fbcf9bd5bc648b1a457ddc55c9e4ab49afb33f9ecae8ce068399a75e3a",
                VALIDATION_IMAGES: "7cee33c3c6414b1b86c25e665a6c4f41584269de3b7cc9768b1d351922845eef",
                VALIDATION_LABELS: "3128d790775889812b73c4f13923559c8b9e281d112c6ea7862acf60a206a909",
            }
        ),
        mirrors=(),
    ),
}

WAYS_TO_GET_IT = (
    "install the Debian package dataset-fashion-mnist (apt install dataset-fashion-mnist); "
    "or run `paceline data fetch fashion-mnist` with a network; "
    "or copy the four files to a folder and use --data-dir FOLDER; "
    "or use fashion-mnist-mini, which ships with paceline and needs no network"
)


Progress = Callable[[str, int, int | None], None]
"""Called with a file's name, the bytes received so far and, if known, the total."""


def load(name: str, data_dir: Path | None = None, progress: Progress | None = None) -> ImageData:
    """The data set `name`, read and checked; downloaded first if it is not on this machine."""
    source = source_named(name)
    folder = find(name, data_dir)
    if folder is None:
        try:
            folder = fetch_fashion_mnist(data_dir, progress)
        except DataError as error:
            raise DataError(f"{name} was not found and could not be downloaded: {error}. To get it: {WAYS_TO_GET_IT}") from None
    train_images, train_labels = _read_pair(folder, TRAIN_IMAGES, TRAIN_LABELS, source.train_size)
    validation_images, validation_labels = _read_pair(folder, VALIDATION_IMAGES, VALIDATION_LABELS, source.validation_size)
    return ImageData(
        name=name,
        where=f"{name} ({source.size}), shipped with paceline" if source.ships else f"{name} ({source.size}) from {folder}",
        classes=_CLASSES,
        train_images=train_images,
        train_labels=train_labels,
        validation_images=validation_images,
        validation_labels=validation_labels,
    )


def find(name: str, data_dir: Path | None = None) -> Path | None:
    """The folder with the four files that `load` would read, or None if it would have to download them."""
    if source_named(name).ships:
        return _MINI_FOLDER
    if data_dir is not None and os.path.exists(data_dir) and not os.path.isdir(data_dir):
        raise DataError(f"--data-dir {data_dir} is a file: it must be a folder")
    if data_dir is not None and _held(_layout_in(data_dir)):
        folders = [data_dir]  # has some of the files: complete those, do not use another folder
    else:
        folders = [*([data_dir] if data_dir is not None else []), _cache_folder(), _SYSTEM_FOLDER]
    layouts = (_layout_in(folder) for folder in folders)
    return next((layout for layout in layouts if len(_held(layout)) == len(_FILES)), None)


def fetch_fashion_mnist(data_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """Download the files that are missing or damaged to `data_dir`, by default the cache folder. Returns their folder."""
    source = SOURCES["fashion-mnist"]
    folder = _layout_in(data_dir if data_dir is not None else _cache_folder())
    for verdict in verify(folder):
        if not verdict.ok:
            file = f"{verdict.file.removesuffix('.gz')}.gz"
            fetch(
                [mirror + file for mirror in source.mirrors],
                folder / file,
                source.sha256[file.removesuffix(".gz")],
                progress=partial(progress, file) if progress else None,
            )
    return folder


def verify(folder: Path, name: str = "fashion-mnist") -> list[Verdict]:
    """Hash each of the four files in `folder` (0.3 s for the full set) against the published content of `name`."""
    expected = source_named(name).sha256
    folder = _layout_in(folder)
    held = _held(folder)
    return [_verdict(held.get(file, folder / f"{file}.gz"), expected[file]) for file in _FILES]


def source_named(name: str) -> Source:
    """The built-in data set with this name; a `UsageError` suggests the nearest name if it does not exist."""
    if name not in SOURCES:
        raise unknown("data set", name, SOURCES)
    return SOURCES[name]


_FILES = (TRAIN_IMAGES, TRAIN_LABELS, VALIDATION_IMAGES, VALIDATION_LABELS)
_CLASSES = 10
_SIDE = 28
_MINI_FOLDER = Path(__file__).parent / "mini"
_REPLACE = "replace it with the published file, or choose another folder"
_SYSTEM_FOLDER = Path("/usr/share/datasets/fashion-mnist")


def _read_pair(
    folder: Path, images_file: str, labels_file: str, size: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    held = _held(folder)
    images_path, labels_path = (held.get(file, folder / f"{file}.gz") for file in (images_file, labels_file))
    images, labels = read_idx(images_path), read_idx(labels_path)
    _check_shape(images_path, images.shape, (size, _SIDE, _SIDE))
    _check_shape(labels_path, labels.shape, (size,))
    if labels.max() >= _CLASSES:
        raise DataError(f"{labels_path} holds label {labels.max()}, but labels must be from 0 to {_CLASSES - 1}: {_REPLACE}")
    return images.reshape(size, 1, _SIDE, _SIDE), labels.astype(np.int64)


def _check_shape(path: Path, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise DataError(f"{path} has shape {found}, but it must be {expected}: {_REPLACE}")


def _layout_in(folder: Path) -> Path:
    """Where in `folder` the files are: directly in it, in `fashion-mnist` (our cache), or in torchvision's layout."""
    return max((folder, folder / "fashion-mnist", folder / "FashionMNIST" / "raw"), key=lambda layout: len(_held(layout)))


def _held(folder: Path) -> dict[str, Path]:
    """The files in `folder`, compressed or not. If both exist, use the compressed one: that is what a fetch repairs."""
    held: dict[str, Path] = {}
    for file in _FILES:
        for path in (folder / file, folder / f"{file}.gz"):
            if os.path.isfile(path):  # Path.is_file raises in a folder that we may not read
                held[file] = path
    return held


def _cache_folder() -> Path:
    """Where downloads go. The only place that reads these environment variables."""
    if chosen := os.environ.get("PACELINE_DATA"):
        return Path(chosen).expanduser()
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        raise DataError(
            "this account has no home folder for the cache: set PACELINE_DATA to a folder you can write to"
        ) from None
    return cache / "paceline" / "fashion-mnist"


def _verdict(path: Path, expected: str) -> Verdict:
    if not os.path.isfile(path):
        return Verdict(path.name, False, "missing")
    try:
        found = content_sha256(path)
    except DataError as error:
        return Verdict(path.name, False, str(error))
    if found != expected:
        return Verdict(path.name, False, f"content SHA-256 is {found[:12]}..., but the published one is {expected[:12]}...")
    return Verdict(path.name, True, f"content SHA-256 {found[:12]}...")
