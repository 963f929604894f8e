"""Checks the simulated device itself, in a process that has it: ``python -m tests.support.simulated.self_check``.

A test that passes on this device says something about a real one only if the device really executes late, keeps its
memory apart and computes what the CPU computes.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from tests.support.simulated.memory import GARBAGE
from tests.support.simulated.queue import QUEUE

DEVICE = torch.device("sim")


def raises(action: Callable[[], object], words: str) -> bool:
    """Return whether an action fails with these words."""
    try:
        action()
    except (RuntimeError, IndexError) as error:
        return words in str(error)
    return False


def operations_run_when_the_host_waits() -> None:
    values = torch.ones(4, device=DEVICE)
    torch.accelerator.synchronize()
    done = QUEUE.num_done
    total = (values * 3).sum()
    assert QUEUE.num_done == done
    assert total.item() == 12
    assert QUEUE.num_done > done


def copy_that_does_not_block_shows_garbage_until_a_wait() -> None:
    source = torch.arange(4.0, device=DEVICE)
    target = torch.empty(4, pin_memory=True).copy_(source, non_blocking=True)
    assert target.view(torch.uint8).tolist() == [GARBAGE] * 16
    torch.accelerator.synchronize()
    assert target.tolist() == [0, 1, 2, 3]


def copy_into_pageable_memory_blocks() -> None:
    source = torch.arange(4.0, device=DEVICE)
    waits = QUEUE.counts().waits
    assert torch.empty(4).copy_(source, non_blocking=True).tolist() == [0, 1, 2, 3]
    assert QUEUE.counts().waits == waits + 1


def pinned_source_is_read_when_the_copy_runs() -> None:
    source = torch.ones(4, pin_memory=True)
    copied = source.to(DEVICE, non_blocking=True)
    source.fill_(7)
    assert copied.tolist() == [7, 7, 7, 7]


def event_waits_for_what_was_launched_before_it() -> None:
    early = torch.empty(1, pin_memory=True)
    early.copy_(torch.ones(1, device=DEVICE), non_blocking=True)
    event = torch.Event("sim")
    event.record()
    late = torch.empty(1, pin_memory=True)
    late.copy_(torch.ones(1, device=DEVICE), non_blocking=True)
    event.synchronize()
    assert early.item() == 1
    assert late.view(torch.uint8).tolist() == [GARBAGE] * 4


def tensors_of_two_devices_do_not_mix() -> None:
    here = torch.ones(2, 2)
    there = torch.ones(2, 2, device=DEVICE)
    mixed: list[Callable[[], object]] = [
        lambda: there + here,
        lambda: there @ here,
        lambda: torch.stack([there, here]),
        lambda: functional.linear(there, here),
        lambda: torch.cat([there, here]),
    ]
    for action in mixed:
        assert raises(action, "same device")


def second_device_is_refused() -> None:
    assert raises(lambda: torch.accelerator.set_device_index(1), "one simulated device")
    assert raises(lambda: torch.empty(1, device="sim:1"), "one simulated device")


def fork_cannot_use_the_device() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0 if raises(lambda: torch.ones(1, device=DEVICE), "forked subprocess") else 1)
    assert os.waitpid(child, 0)[1] == 0


def results_have_the_bits_of_the_cpu() -> None:
    """Convolution, normalisation, attention, dropout by seed, an optimizer: forward, backward, update."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(1, 2), nn.LayerNorm(4), nn.Dropout(0.3)
    )
    encoder = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    on_host = nn.Sequential(layers, encoder)
    on_device = copy.deepcopy(on_host).to(DEVICE)
    images = torch.randn(3, 1, 6, 6)
    for model, batch in ((on_host, images), (on_device, images.to(DEVICE))):
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for step in range(3):
            torch.manual_seed(step)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in on_host.state_dict().items():
        assert torch.equal(value, on_device.state_dict()[name].cpu()), name


def failure_of_a_queued_operation_is_raised_at_the_wait() -> None:
    indices = torch.tensor([5], device=DEVICE)
    found = torch.ones(3, device=DEVICE)[indices]
    assert raises(found.tolist, "out of bounds")


CHECKS = (
    operations_run_when_the_host_waits,
    copy_that_does_not_block_shows_garbage_until_a_wait,
    copy_into_pageable_memory_blocks,
    pinned_source_is_read_when_the_copy_runs,
    event_waits_for_what_was_launched_before_it,
    tensors_of_two_devices_do_not_mix,
    second_device_is_refused,
    fork_cannot_use_the_device,
    results_have_the_bits_of_the_cpu,
    failure_of_a_queued_operation_is_raised_at_the_wait,
)

if __name__ == "__main__":
    for check in CHECKS:
        check()
        print(check.__name__.replace("_", " "))
