"""Pictures become PNG files that any reader shows as they were."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline.serialization.png import png_of, size_of

GREY = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
COLOUR = np.arange(36, dtype=np.uint8).reshape(3, 4, 3) * 7
PICTURES: dict[str, tuple[Any, np.ndarray]] = {
    "grey bytes": (GREY, GREY),
    "colour bytes": (COLOUR, COLOUR),
    "grey floats": (GREY / 255, GREY),
    "one channel": (GREY[..., None], GREY),
    "tensor with channels first": (torch.from_numpy(np.moveaxis(COLOUR, -1, 0) / 255).float(), COLOUR),
    "half precision": (torch.ones(3, 4, dtype=torch.bfloat16), np.full((3, 4), 255)),
    "mask": (GREY > 100, (GREY > 100) * 255),
    "floats out of range": (np.array([[-1.0, 2.0, np.nan]]), np.array([[0, 255, 0]])),
    "part of an array": (COLOUR[::2, 1:], COLOUR[::2, 1:]),
}


@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_read_back_as_it_was(name: str) -> None:
    """Another reader finds the same bytes in the same places."""
    picture, expected = PICTURES[name]
    png = png_of(picture)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(png))), expected)
    assert size_of(png) == (expected.shape[1], expected.shape[0])


def test_figure_saves_itself() -> None:
    """Whatever has savefig, as figures of matplotlib do, is asked for a PNG file."""

    class Figure:
        def savefig(self, file: Any, format: str) -> None:
            file.write(format.encode())

    assert png_of(Figure()) == b"png"


@pytest.mark.parametrize("picture", [np.zeros((2, 2, 2)), np.zeros(3), np.zeros((2, 2), int), np.zeros((0, 2)), "no"])
def test_what_is_no_picture_is_refused(picture: Any) -> None:
    """The message says what an image must be."""
    with pytest.raises(ValueError, match="an image must"):
        png_of(picture)
