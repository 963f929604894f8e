"""Augmentation that draws from python's, numpy's and torch's generators alike: all of them are keyed."""

import random

import numpy as np
import torch


def augment(image):
    """Shift by a pixel in one direction or none, change the brightness and add noise."""
    axis, step = random.choice([(1, 1), (1, -1), (2, 1), (2, -1), (1, 0), (2, 0)])
    shifted = np.roll(image, step, axis=axis)
    noise = np.random.normal(0, 0.02, image.shape).astype(np.float32)
    brightness = 0.9 + 0.2 * torch.rand(()).item()
    return np.clip(shifted * np.float32(brightness) + noise, 0, 1)
