"""Test that boxes are inside the image, have the stated area and shape, and are uniform over all positions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchnorm.data.crop_boxes import CROP_AREA, CROP_ASPECT, DRAWS, center_box, random_box
from batchnorm.data.random_numbers import uniforms

SIDES = st.integers(1, 2000)


@given(st.lists(st.floats(0, 1, exclude_max=True), min_size=DRAWS, max_size=DRAWS), SIDES, SIDES)
def test_random_boxes_lie_inside_the_image(draws, width, height):
    box = random_box(draws, width, height)
    assert 0 <= box.left < box.right <= width
    assert 0 <= box.top < box.bottom <= height


@given(SIDES, SIDES, st.integers(1, 500))
def test_center_boxes_lie_inside_the_image(width, height, size):
    box = center_box(width, height, size)
    assert 0 <= box.left < box.right <= width
    assert 0 <= box.top < box.bottom <= height
    assert box.right - box.left == box.bottom - box.top
    assert abs(box.left + box.right - width) <= 1
    assert abs(box.top + box.bottom - height) <= 1


@pytest.mark.parametrize("area", [CROP_AREA, (0.25, 1.0)])
def test_random_boxes_are_distributed_as_stated(area):
    width, height = 500, 375
    boxes = np.array([random_box(d, width, height, area) for d in uniforms(0, np.arange(4000), DRAWS).tolist()])
    w, h = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    share, aspect = w * h / (width * height), w / h
    assert share.min() > area[0] - 0.005
    assert share.max() <= area[1]
    assert aspect.min() > CROP_ASPECT[0] * 0.98
    assert aspect.max() < CROP_ASPECT[1] * 1.02
    # Boxes of up to half of the image fit in every aspect ratio, so their area is uniform.
    small = share[share < 0.5]
    np.testing.assert_allclose(
        np.quantile(small, [0.25, 0.5, 0.75]), area[0] + (0.5 - area[0]) * np.arange(1, 4) / 4, atol=0.02
    )
    place = boxes[w < width, 0] / (width - w[w < width])
    np.testing.assert_allclose(np.quantile(place, [0.25, 0.5, 0.75]), [0.25, 0.5, 0.75], atol=0.03)


def test_an_image_too_long_for_any_crop_gives_its_center():
    box = random_box([0.99] * DRAWS, 1000, 10)
    assert (box.bottom - box.top, box.right - box.left) == (10, 13)
    assert box.left == (1000 - 13) // 2


@pytest.mark.parametrize(
    ("width", "height", "side", "why"),
    [
        (341, 256, 224, "224 out of 256, the usual crop"),
        (512, 640, 448, "the same share of a larger image"),
        (240, 300, 224, "no pixel is enlarged in order to be cut away"),
        (64, 64, 64, "a smaller image is seen whole"),
        (100, 50, 50, "a smaller image is seen up to its short side"),
    ],
)
def test_center_box(width, height, side, why):
    box = center_box(width, height, 224)
    assert box.right - box.left == side, why
