"""Batch schedules that are made or resized, and how they are written."""

import pytest

from paceline.errors import UsageError
from paceline.phases import (
    batch_words,
    grow_batch,
    largest_batch,
    make_phases,
    parse_batch_schedule,
    phases_of_auto,
    place_of,
    resize_batch_schedule,
    start_of,
)


@pytest.mark.parametrize(
    ("batch", "epochs", "parts", "smallest", "least", "schedule"),
    [
        (8192, 10, 64, 32, 128, "0:1024 1:2048 3:4096 6:8192"),
        (1024, 10, 8, 32, 128, "0:128 1:256 3:512 6:1024"),
        (1024, 2, 8, 32, 128, "0:128 0.2:256 0.6:512 1.2:1024"),
        (512, 10, 4, 32, 128, "0:128 3:256 6:512"),  # batches below the reference are left out
        (256, 10, 2, 32, 128, "0:128 6:256"),
        (128, 10, 2, 32, 128, ""),
        (192, 10, 2, 32, 128, ""),
        (1100, 10, 11, 10, 100, "0:132 1:275 3:550 6:1100"),  # 137 does not divide into 11 parts
    ],
)
def test_a_batch_grows_in_doublings(batch, epochs, parts, smallest, least, schedule):
    found = grow_batch(batch, epochs, parts, smallest, least)
    assert found == schedule
    make_phases(parse_batch_schedule(found), parts, smallest)  # raises unless every batch divides into its parts


@pytest.mark.parametrize("parts", [2, 3, 7, 48, 64])
@pytest.mark.parametrize("smallest", [1, 8, 32])
@pytest.mark.parametrize("times", [16, 33, 128])
def test_made_batches_divide_into_their_parts(parts, smallest, times):
    for text in (
        grow_batch(parts * times, 10, parts, smallest, 1),
        resize_batch_schedule(GIVEN, parts * times, parts, smallest),
    ):
        phases = make_phases(parse_batch_schedule(text), parts, smallest)
        assert (phases[-1].global_batch, phases[-1].parts) == (parts * times, parts)


GIVEN = "0:1024 1:2048 3:4096 6:8192"


@pytest.mark.parametrize(
    ("given", "batch", "parts", "stretch", "schedule"),
    [
        (GIVEN, 8192, 64, 1, GIVEN),
        (GIVEN, 4096, 64, 1, "0:512 1:1024 3:2048 6:4096"),
        (GIVEN, 8192, 64, 0.2, "0:1024 0.2:2048 0.6:4096 1.2:8192"),
        (GIVEN, 6400, 50, 1, "0:800 1:1600 3:3200 6:6400"),
        ("0:512 1:8192 9:1024", 4096, 4, 1, "0:256 1:4096 9:512"),  # the largest need not be the last
        ("auto", 8192, 64, 1, "auto"),
        ("auto:512", 4096, 64, 1, "auto"),
        ("", 512, 4, 1, ""),
    ],
)
def test_a_schedule_is_resized(given, batch, parts, stretch, schedule):
    assert resize_batch_schedule(given, batch, parts, 32, stretch=stretch) == schedule


@pytest.mark.parametrize(
    ("text", "batch", "parts", "found"),
    [
        ("auto", 4096, 64, [(128, 4), (256, 8), (512, 16), (1024, 32), (2048, 64), (4096, 64)]),
        ("auto", 512, 4, [(64, 2), (128, 4), (256, 4), (512, 4)]),  # the first batch needs two parts of 32
        ("auto", 896, 7, [(224, 7), (448, 7), (896, 7)]),  # 112 would not divide into 3 parts
        ("auto", 64, 4, [(32, 2), (64, 4)]),  # parts of 16 at most: then that is the smallest
        ("auto", 99, 3, [(99, 3)]),
        ("auto:256", 1024, 4, [(256, 4), (512, 4), (1024, 4)]),
    ],
)
def test_auto_starts_with_parts_to_compare(text, batch, parts, found):
    assert [(phase.global_batch, phase.parts) for phase in phases_of_auto(text, batch, parts, 32)] == found


@pytest.mark.parametrize(
    ("text", "batch", "parts", "words"),
    [
        ("auto:300", 1024, 4, "the global batch of 1024 is not 300 times a power of 2: use --global-batch 1200"),
        ("auto:32", 1024, 4, "a batch of 32 has one part, and gradients of parts are compared: start at 64"),
        ("auto:112", 896, 7, "a batch of 112 does not divide into 3 equal parts: start at 224"),
        ("auto", 1024, 1, "use --virtual-workers 2 or more"),
    ],
)
def test_a_start_of_auto_that_cannot_be_used(text, batch, parts, words):
    with pytest.raises(UsageError, match=words):
        phases_of_auto(text, batch, parts, 32)


@pytest.mark.parametrize("samples", [103, 6000, 60_000, 1_281_167])
def test_a_place_is_written_with_few_digits_and_found_again(samples):
    for done in (0, 1, samples // 3, samples - 1, samples, 7 * samples + samples // 7):
        start = start_of(done, samples)
        assert place_of(start, samples) == done
        assert start == round(start, len(str(samples)) + 2)


def test_phases_in_words():
    assert batch_words([1024, 2048, 4096, 8192]) == "1,024 to 8,192 in 4 phases"
    assert batch_words([1024, 256]) == "1,024 to 256 in 2 phases"
    assert batch_words([1024, 4096, 1024]) == "between 1,024 and 4,096 in 3 phases"
    assert (batch_words([1024]), batch_words([])) == ("1,024", "")


@pytest.mark.parametrize(("largest", "parts", "smallest"), [(4096, 64, 32), (600, 6, 1), (96, 3, 8), (640, 64, 32), (70, 7, 3)])
def test_every_batch_that_an_error_recommends_is_accepted(largest, parts, smallest):
    refused = 0
    for batch in range(1, largest):
        try:
            make_phases([(0, batch), (1, largest)], parts, smallest)
        except UsageError as error:
            refused += 1
            recommended = [int(each) for each in str(error).rpartition(": use ")[2].split(" or ")]
            assert all(make_phases([(0, each), (1, largest)], parts, smallest) for each in recommended)
            assert min(abs(each - batch) for each in recommended) <= max(parts, smallest)
    assert refused


def test_the_largest_batch_need_not_be_the_last():
    assert largest_batch(parse_batch_schedule("0:512 1:8192 9:1024"), 7) == 8192
    assert (largest_batch((), 7), largest_batch(())) == (7, 0)
