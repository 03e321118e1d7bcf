"""The picture is valid XML that needs nothing else, whatever the losses are."""

import math
from xml.etree import ElementTree

import pytest

from paceline.lr_find.picture import draw
from paceline.lr_find.rule import Advice, Point

ADVICE = Advice(lr=1e-3, minimum_lr=1e-2, steepest_lr=3e-3)


@pytest.mark.parametrize(
    "losses", [[2.0, 1.0, 0.5, 9.0], [1.0] * 4, [math.nan] * 4, [-3.0, -4.0, math.inf, math.nan], [1e-9, 2e-9, 3e-9, 1e30]]
)
def test_it_is_valid_for_all_losses(losses: list[float]) -> None:
    points = [Point(step=i + 1, lr=10.0 ** (i - 4), loss=loss, smoothed=loss) for i, loss in enumerate(losses)]
    for advice in (ADVICE, None):
        text = draw(points, advice, "a <title> & more")
        root = ElementTree.fromstring(text)
        assert root.tag.endswith("svg")
        assert "nan" not in text
        assert "inf" not in text.replace("inside", "")
        assert text.count("http") == 1, "only the name space: no other address"
        assert ("recommended 0.001" in text) == (advice is not None)
