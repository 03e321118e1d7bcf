"""Scale and augment a whole batch of images at once, on its device.

Every random choice is keyed by (seed, epoch, sample), so in a given epoch a sample looks the same on any worker (law 3).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.keys import key, keys_torch, uniform

_AREA = (0.02, 0.25)  # of the image; Zhong et al. 2017, "Random Erasing", arXiv:1708.04896, uses up to 0.4
_ASPECT = (0.3, 3.3)


@dataclass(frozen=True, kw_only=True)
class Images:
    """Turns (uint8 images NCHW, labels) into the model's inputs. In validation (`epoch` None) it only scales."""

    mean: float = 0.0
    deviation: float = 1.0
    crop: int = 0
    flip: bool = False
    erase: float = 0.0
    seed: int = 0

    def describe(self) -> str:
        """What it does to training images, and how it scales all images."""
        done = ["flip left to right"] if self.flip else []
        done += [f"crop after padding by {self.crop}"] if self.crop else []
        done += [f"erase with probability {self.erase:g}"] if self.erase else []
        standard = f"standardized (mean {self.mean:g}, deviation {self.deviation:g})"
        pixels = "in [0, 1]" if (self.mean, self.deviation) == (0, 1) else standard
        return f"{', '.join(done) or 'none'}; pixels {pixels}"

    def __call__(self, batch: tuple[Tensor, ...], samples: Tensor, epoch: int | None) -> tuple[Tensor, ...]:
        return self.apply(batch, samples, None if epoch is None else self.epoch_key(epoch))

    def epoch_key(self, epoch: int) -> int:
        """The key of an epoch: together with the sample it determines every random choice."""
        return key(self.seed, epoch)

    def apply(self, batch: tuple[Tensor, ...], samples: Tensor, epoch_key: int | Tensor | None) -> tuple[Tensor, ...]:
        """The same, given the epoch's key. If it is a tensor, a CUDA graph can replay this with another key."""
        images, *rest = batch
        if epoch_key is not None and (self.crop or self.flip):
            images = self._shift(images, keys_torch(epoch_key, samples))
        images = images.to(torch.float32).mul_(1 / (255 * self.deviation)).sub_(self.mean / self.deviation)
        if epoch_key is not None and self.erase:
            images = self._erase(images, keys_torch(epoch_key, samples))
        return images, *rest

    def _shift(self, images: Tensor, keys: Tensor) -> Tensor:
        """Crop and flip in one gather: compute the source row and column of each pixel."""
        count, _, height, width = images.shape
        pad = self.crop
        if not pad and images.device.type == "cpu":  # copies whole images: 1.9 times as fast as a gather by pixel
            mirrored = uniform(keys, 1) < 0.5
            return torch.cat((images, images.flip(3))).index_select(0, torch.arange(count) + count * mirrored)
        rows = torch.arange(height, device=images.device).expand(count, height)
        columns = torch.arange(width, device=images.device).expand(count, width)
        if self.flip:
            columns = torch.where(uniform(keys, 1)[:, None] < 0.5, width - 1 - columns, columns)
        if pad:
            images = torch.nn.functional.pad(images, (pad, pad, pad, pad))
            rows = rows + (uniform(keys, 2) * (2 * pad + 1)).long()[:, None]
            columns = columns + (uniform(keys, 3) * (2 * pad + 1)).long()[:, None]
        flat = rows[:, :, None] * images.shape[3] + columns[:, None, :]
        channels = images.shape[1]
        index = flat.view(count, 1, -1).expand(count, channels, -1)
        return images.flatten(2).gather(2, index).view(count, channels, height, width)

    def _erase(self, images: Tensor, keys: Tensor) -> Tensor:
        """Fill one random rectangle with zeros (the mean of standardized pixels)."""
        _, _, height, width = images.shape
        area = (_AREA[0] + (_AREA[1] - _AREA[0]) * uniform(keys, 4)) * height * width
        aspect = torch.exp(math.log(_ASPECT[1] / _ASPECT[0]) * uniform(keys, 5)) * _ASPECT[0]
        tall, wide = (area * aspect).sqrt().clamp(1, height).round(), (area / aspect).sqrt().clamp(1, width).round()
        top, left = (uniform(keys, 6) * (height - tall + 1)).floor(), (uniform(keys, 7) * (width - wide + 1)).floor()
        rows, columns = torch.arange(height, device=images.device), torch.arange(width, device=images.device)
        in_rows = (rows >= top[:, None]) & (rows < (top + tall)[:, None])
        in_columns = (columns >= left[:, None]) & (columns < (left + wide)[:, None])
        chosen = (uniform(keys, 8) < self.erase)[:, None, None]
        return images.masked_fill((in_rows[:, :, None] & in_columns[:, None, :] & chosen)[:, None], 0.0)
