"""Simulated throws: where a ball lands, given how it is thrown."""

import numpy as np

GRAVITY = 9.81
SECONDS_PER_STEP = 0.01


def simulate_throws(num_throws, seed=0):
    """Return inputs of shape (num_throws, 5), and how far each ball flies, in metres."""
    draw = np.random.default_rng(seed)
    speed = draw.uniform(10, 40, num_throws)
    angle = np.radians(draw.uniform(20, 70, num_throws))
    height = draw.uniform(0, 3, num_throws)
    drag = draw.uniform(0.0, 0.02, num_throws)
    wind = draw.uniform(-8, 8, num_throws)
    inputs = np.stack([speed, angle, height, drag, wind], axis=1).astype(np.float32)
    return inputs, _distances(speed, angle, height, drag, wind).astype(np.float32)


def _distances(speed, angle, height, drag, wind):
    """Follow all balls in small steps of time until the last one has landed."""
    position = np.stack([np.zeros_like(height), height])
    velocity = speed * np.stack([np.cos(angle), np.sin(angle)])
    while (is_flying := position[1] >= 0).any():
        against_air = velocity - np.stack([wind, np.zeros_like(wind)])
        acceleration = -drag * np.linalg.norm(against_air, axis=0) * against_air
        acceleration[1] -= GRAVITY
        velocity += is_flying * SECONDS_PER_STEP * acceleration
        position += is_flying * SECONDS_PER_STEP * velocity
    return position[0]
