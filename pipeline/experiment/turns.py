"""Turns: which optimizers act in a step, and whose gradient each of them follows.

Pure arithmetic on the number of the step, so a run that continues, on any number of processes, knows it again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from pipeline.experiment.pymodules.definitions import OptimSched
from pipeline.experiment.settings.settings import Settings


@dataclass(frozen=True)
class Follower:
    """Optimizers that follow the gradient of the same registers."""

    optimizers: tuple[str, ...]
    registers: frozenset[str]


@dataclass(frozen=True)
class Turn:
    """One update: a step has one, or several that share its batches.

    ``is_whole``: all optimizers act, and follow all optimised registers, as they do without turns.
    """

    # Its place in the list of turns.
    number: int
    # Part of the keys of random draws, if a step has several turns.
    key: tuple[str | int, ...]
    followers: tuple[Follower, ...]
    # Registers whose losses are recorded in this turn: a step records each once.
    recorded: frozenset[str]
    is_whole: bool = False

    @cached_property
    def optimizers(self) -> tuple[str, ...]:
        return tuple(name for follower in self.followers for name in follower.optimizers)

    @cached_property
    def needed(self) -> frozenset[str]:
        """Registers that an optimizer follows in this turn; a module transform may leave out the others."""
        return frozenset[str]().union(*(follower.registers for follower in self.followers))


class TurnPlan:
    """The turns of every step. Steps count from 0 over all epochs."""

    def __init__(
        self,
        definitions: Mapping[str, OptimSched],
        settings: Settings,
        turns_per_update: Mapping[str, int] | None = None,
    ) -> None:
        # Of optimizers that need several turns for one update.
        self._turns_per_update = turns_per_update or {}
        training = settings.training
        optimised = [register.name for register in settings.loss_registers if register.optimize]
        self._registers = [register.name for register in settings.registers_of("train")]
        self._definitions = definitions
        self._followed = {name: frozenset(entry.loss_registers or optimised) for name, entry in definitions.items()}
        self._turns = training.turns or (tuple(definitions),)
        self._shares_batches = training.share_batches and len(self._turns) > 1
        # After so many steps everything repeats.
        self.period = math.lcm(
            1 if self._shares_batches else len(self._turns), *(entry.every_steps for entry in definitions.values())
        )
        self._steps = [self._create_step(step) for step in range(self.period)]
        # Every optimizer acts once in every step.
        self.is_every_step = all(len(turns) == 1 and turns[0].is_whole for turns in self._steps)
        # For each optimizer, in how many turns it has acted before each step of a period, and in all of it.
        self._updates = {
            name: [0, *accumulate(sum(name in turn.optimizers for turn in turns) for turns in self._steps)]
            for name in definitions
        }

    def of_step(self, step: int) -> list[Turn]:
        """Return the turns of a step, in their order."""
        return self._steps[step % self.period]

    def different_turns(self) -> list[Turn]:
        """Return every turn that differs from the others, in the order in which they first come."""
        return list(dict.fromkeys(turn for turns in self._steps for turn in turns))

    def updates_before(self, optimizer: str, step: int) -> int:
        """Return how many updates an optimizer is to take before a step, whether or not they are skipped for a NaN."""
        rounds, rest = divmod(step, self.period)
        before = self._updates[optimizer]
        return (rounds * before[-1] + before[rest]) // self._turns_per_update.get(optimizer, 1)

    def _create_step(self, step: int) -> list[Turn]:
        named = self._turns if self._shares_batches else [self._turns[step % len(self._turns)]]
        # An optimizer acts in every k-th step: in the last of each k, as an accumulated gradient would be applied.
        acting = [[name for name in names if (step + 1) % self._definitions[name].every_steps == 0] for names in named]
        turns: list[Turn] = []
        first = 0 if self._shares_batches else step % len(self._turns)
        left = set(self._registers)
        # A turn in which nobody acts would only cost a pass over the batches; a step has one turn at least.
        numbered = [(number, names) for number, names in enumerate(acting) if names] or [(len(acting) - 1, acting[-1])]
        for number, names in numbered:
            followers = self._group(names)
            followed = {name for follower in followers for name in follower.registers}
            is_last = number == numbered[-1][0]
            # What no optimizer follows in any turn is recorded in the last.
            recorded = frozenset(left if is_last else left & followed)
            left -= recorded
            is_whole = {*names} == {*self._definitions} and len(followers) == 1 and not self._has_own_registers()
            key = ("turn", number) if self._shares_batches else ()
            turns.append(Turn(first + number, key, followers, recorded, is_whole))
        return turns

    def _has_own_registers(self) -> bool:
        return any(entry.loss_registers is not None for entry in self._definitions.values())

    def _group(self, names: list[str]) -> tuple[Follower, ...]:
        """Return optimizers of one turn, those that follow the same registers together: one backward pass each."""
        groups: dict[frozenset[str], list[str]] = {}
        for name in names:
            groups.setdefault(self._followed[name], []).append(name)
        return tuple(Follower(tuple(group), registers) for registers, group in groups.items())
