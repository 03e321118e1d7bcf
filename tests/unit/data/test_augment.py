"""Augmentation compared with a loop over single images; and law 3: it depends only on (seed, epoch, sample)."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.core.keys import key
from paceline.data.augment import Images

COUNT, SIDE = 200, 12
SAMPLES = torch.randperm(10_000, generator=torch.Generator().manual_seed(3))[:COUNT]
IMAGES = torch.randint(1, 256, (COUNT, 2, SIDE, SIDE), generator=torch.Generator().manual_seed(4), dtype=torch.uint8)
LABELS = torch.arange(COUNT)


def naive(images: Images, image: np.ndarray, sample: int, epoch: int) -> np.ndarray:
    """One image, step by step, in plain numpy."""

    def draw(stream: int) -> np.float32:
        return np.float32(key(stream, key(images.seed, epoch, sample)) >> 40) * np.float32(2.0**-24)

    _, height, width = image.shape
    if images.crop:
        pad = images.crop
        padded = np.pad(image, ((0, 0), (pad, pad), (pad, pad)))
        top, left = int(draw(2) * (2 * pad + 1)), int(draw(3) * (2 * pad + 1))
        image = padded[:, top : top + height, left : left + width]
    if images.flip and draw(1) < 0.5:
        image = image[:, :, ::-1]
    pixels = (image / 255 - images.mean) / images.deviation
    if images.erase and draw(8) < images.erase:
        area = (0.02 + 0.23 * draw(4)) * height * width
        aspect = 0.3 * math.exp(math.log(3.3 / 0.3) * draw(5))
        tall = round(min(max(math.sqrt(area * aspect), 1), height))
        wide = round(min(max(math.sqrt(area / aspect), 1), width))
        top, left = int(draw(6) * (height - tall + 1)), int(draw(7) * (width - wide + 1))
        pixels[:, top : top + tall, left : left + wide] = 0
    return pixels


def apply(images: Images, epoch: int | None = 2, which: Tensor | slice = slice(None)) -> Tensor:
    found, labels = images((IMAGES[which], LABELS[which]), SAMPLES[which], epoch)
    assert torch.equal(labels, LABELS[which])
    return found


ALL = Images(mean=0.3, deviation=0.4, crop=2, flip=True, erase=0.5, seed=9)


@pytest.mark.parametrize(
    "images",
    [
        Images(crop=2, seed=1),
        Images(crop=5, seed=2**70),
        Images(flip=True, seed=3),
        Images(crop=3, flip=True, seed=4),
        Images(erase=0.5, seed=5),
        ALL,
    ],
)
def test_each_image_equals_that_of_a_plain_loop(images):
    found = apply(images)
    assert found.dtype == torch.float32
    assert found.shape == IMAGES.shape
    for i in range(COUNT):
        expected = naive(images, IMAGES[i].numpy(), int(SAMPLES[i]), epoch=2)
        np.testing.assert_allclose(found[i].numpy(), expected, atol=1e-6, err_msg=f"image {i}")


def test_a_sample_does_not_depend_on_its_batch_or_its_place_in_it():
    together = apply(ALL)
    alone = torch.cat([apply(ALL, which=slice(i, i + 1)) for i in range(COUNT)])
    assert torch.equal(alone, together)
    shuffled = torch.randperm(COUNT, generator=torch.Generator().manual_seed(5))
    assert torch.equal(apply(ALL, which=shuffled), together[shuffled])


def test_torchs_generator_has_no_influence():
    torch.manual_seed(0)
    first = apply(ALL)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert torch.equal(apply(ALL), first)
    assert torch.equal(torch.get_rng_state(), before)


def test_epochs_and_seeds_differ():
    first = apply(ALL, epoch=0)
    for other in (apply(ALL, epoch=1), apply(Images(mean=0.3, deviation=0.4, crop=2, flip=True, erase=0.5, seed=10), epoch=0)):
        same = (first == other).flatten(1).all(1)
        assert same.float().mean() < 0.2


def test_validation_only_scales():
    found = apply(ALL, epoch=None)
    assert torch.allclose(found, (IMAGES / 255 - 0.3) / 0.4, atol=1e-6)


def test_without_augmentation_training_only_scales_too():
    plain = Images(mean=0.3, deviation=0.4)
    assert torch.equal(apply(plain, epoch=3), apply(plain, epoch=None))


def test_the_stored_pixels_stay_as_they_are():
    before = IMAGES.clone()
    apply(ALL)
    assert torch.equal(IMAGES, before)


def test_flip_flips_half():
    unchanged = (apply(Images(flip=True)) == apply(Images())).flatten(1).all(1).float().mean()
    assert 0.35 < unchanged < 0.65


def test_crop_reaches_every_corner():
    ones = torch.full((5000, 1, 4, 4), 255, dtype=torch.uint8)
    (found,) = Images(crop=2)((ones,), torch.arange(5000), 0)
    sizes = {
        (int(rows), int(columns)) for rows, columns in zip(found.amax(3).sum((1, 2)), found.amax(2).sum((1, 2)), strict=True)
    }
    assert sizes == {(rows, columns) for rows in (2, 3, 4) for columns in (2, 3, 4)}


def test_erase_takes_one_rectangle_of_some_images():
    ones = torch.full((4000, 1, 28, 28), 255, dtype=torch.uint8)
    (found,) = Images(erase=0.25)((ones,), torch.arange(4000), 0)
    holes = found[:, 0] == 0
    erased = holes.flatten(1).any(1)
    assert 0.21 < erased.float().mean() < 0.29
    assert torch.equal(holes, holes.any(2)[:, :, None] & holes.any(1)[:, None, :]), "a hole is no rectangle"
    area = holes[erased].flatten(1).float().mean(1)
    assert area.min() > 0.01
    assert 0.2 < area.max() < 0.3
    assert holes.any(0).all(), "some pixel is never erased"


def test_erase_never_and_always():
    assert not (apply(Images(erase=0.0)) == 0).any()
    assert (apply(Images(erase=1.0)) == 0).flatten(1).any(1).all()
