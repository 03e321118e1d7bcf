"""Build `fashion-mnist-mini` from the full Fashion-MNIST: the files that ship in `src/paceline/data/mini/`.

The first 600 training and the first 100 test images of each class, in their original order. The same input gives the same
content every time; it prints the SHA-256 of each, which `paceline.data.fashion_mnist` holds.

    python tools/make_mini.py [FOLDER_WITH_THE_FULL_SET]
"""

import gzip
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.data import fashion_mnist
from paceline.data.download import content_sha256

TARGET = Path(__file__).parents[1] / "src" / "paceline" / "data" / "mini"
TRAIN_PER_CLASS = 600
VALIDATION_PER_CLASS = 100


def main() -> None:
    full = fashion_mnist.load("fashion-mnist", Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    print(f"from {full.where}")
    TARGET.mkdir(parents=True, exist_ok=True)
    train = first_of_each_class(full.train_labels, TRAIN_PER_CLASS)
    validation = first_of_each_class(full.validation_labels, VALIDATION_PER_CLASS)
    write_idx(fashion_mnist.TRAIN_IMAGES, full.train_images[train, 0])
    write_idx(fashion_mnist.TRAIN_LABELS, full.train_labels[train].astype(np.uint8))
    write_idx(fashion_mnist.VALIDATION_IMAGES, full.validation_images[validation, 0])
    write_idx(fashion_mnist.VALIDATION_LABELS, full.validation_labels[validation].astype(np.uint8))
    (TARGET / "LICENSE").write_text(LICENSE, encoding="utf-8")
    (TARGET / "README.md").write_text(README, encoding="utf-8")


def first_of_each_class(labels: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Indices, ascending, of the first `count` samples of each class."""
    return np.sort(np.concatenate([np.flatnonzero(labels == label)[:count] for label in range(10)]))


def write_idx(name: str, values: npt.NDArray[np.uint8]) -> None:
    header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, dtype=">u4").tobytes()
    path = TARGET / f"{name}.gz"
    # No name and no time in the gzip header, so that building again changes nothing.
    with path.open("wb") as file, gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=file, mtime=0) as packed:
        packed.write(header + values.tobytes())
    print(f"{path.name:<30}{path.stat().st_size:>10,} bytes  {content_sha256(path)}")


LICENSE = """\
The MIT License (MIT)

Copyright (c) 2017 Zalando SE, https://tech.zalando.com

Permission is hereby granted, free of charge, to any person obtaining a
copy of this software and associated documentation files (the "Software"),
to deal in the Software without restriction, including without limitation
the rights to use, copy, modify, merge, publish, distribute, sublicense,
and/or sell copies of the Software, and to permit persons to whom the
Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included
in all copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS
OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF
MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT.
IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY
CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT,
TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE
SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""

README = """\
# fashion-mnist-mini

A real, stratified subset of Fashion-MNIST: 6,000 training and 1,000 test images, 28 x 28 gray, 10 classes.

`tools/make_mini.py` takes the first 600 training and the first 100 test images of each class, keeps their original order and
writes them as gzipped IDX files under the names of the full set. Nothing else is changed.

Fashion-MNIST is by Han Xiao, Kashif Rasul and Roland Vollgraf: *Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine
Learning Algorithms*, 2017, arXiv:1708.07747. It is under the MIT license, in `LICENSE` in this folder.
"""


if __name__ == "__main__":
    main()
