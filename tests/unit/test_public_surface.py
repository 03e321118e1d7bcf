"""What users may rely on: these names, no more and no less, and `import paceline` costs nothing."""

import pytest

import paceline

PUBLIC = [
    "Arrays",
    "Config",
    "ExactReducer",
    "Hooks",
    "Images",
    "Moment",
    "PacelineError",
    "Parts",
    "Result",
    "Sampler",
    "Schedule",
    "Stream",
    "Task",
    "Weighted",
    "World",
    "balanced",
    "classify",
    "load",
    "print",
    "save",
    "tar_stream",
    "total",
    "train",
    "world",
]


def test_the_public_names():
    assert paceline.__all__ == PUBLIC
    assert dir(paceline) == sorted([*PUBLIC, "__version__"])


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there_and_documented(name):
    value = getattr(paceline, name)
    assert value.__name__ == name
    assert value.__doc__
    assert not value.__doc__.startswith(f"{name}("), "a dataclass's own signature is no documentation"
    assert value.__module__.startswith("paceline.")


def test_other_names_are_not_there():
    with pytest.raises(AttributeError, match="module 'paceline' has no attribute 'trian'"):
        paceline.trian  # noqa: B018
