"""Data: the built-in sets, downloads, augmentation and the two loaders; `paceline data`.

Owns everything between a file on disk and a batch on the device.
May import: core, dist, errors, files. Start reading at `loaders.py`; a new built-in set is a file like `fashion_mnist.py`.
"""
