"""Data: the built-in sets, downloads, augmentation and the two loaders; `paceline data`.

Owns everything between a file on disk and a batch on the device.
May import: core, dist, errors, files. Start reading at `loaders.py`; a new built-in set is a file like `fashion_mnist.py`.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.data.fashion_mnist import ImageData


def load(name: str, data_dir: str | Path | None = None) -> "ImageData":
    """A built-in data set as numpy arrays: "fashion-mnist", or "fashion-mnist-mini", which ships with Paceline."""
    from paceline.data import fashion_mnist  # here, so that importing the package stays light

    return fashion_mnist.load(name, None if data_dir is None else Path(data_dir))
