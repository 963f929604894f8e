"""Flags of parameters: read, set and written down by name."""

from __future__ import annotations

from torch import nn

from pipeline.experiment.gradient_flags import GradientFlags


def test_flags_come_back_as_they_were_written() -> None:
    """Frozen parameters are listed by module; a weight that two modules share goes by its first name."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    flags = GradientFlags({"first": first, "second": second})
    second.bias.requires_grad_(False)
    first.weight.requires_grad_(False)
    written = flags.as_json(flags.now())
    assert written == {"first": ["weight"], "second": ["bias"]}
    flags.set((True, True, True))
    assert flags.as_json(flags.now()) == {}
    flags.set(flags.from_json(written))
    assert not second.weight.requires_grad
    assert flags.names(flags.select_trained(flags.now())) == ["first.bias"]
