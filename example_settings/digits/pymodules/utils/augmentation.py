"""Augmentation that draws from python's, numpy's and torch's generators alike: all of them are keyed."""

import random

import numpy as np
import torch


def augment(image):
    """Shift by up to one pixel, change the brightness and add noise."""
    shift = random.randint(-1, 1), random.randint(-1, 1)
    shifted = np.roll(image, shift, axis=(1, 2))
    noise = np.random.normal(0, 0.03, image.shape).astype(np.float32)
    brightness = 0.9 + 0.2 * torch.rand(()).item()
    return np.clip(shifted * np.float32(brightness) + noise, 0, 1)
