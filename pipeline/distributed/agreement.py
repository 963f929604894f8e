"""Agreement of ranks: values that must be the same on every rank, compared by name."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from pipeline.distributed.processes import Processes

Values = Mapping[str, Hashable]


@dataclass(frozen=True)
class Difference:
    """A value that is not the same on every rank: its name, and the ranks that agree with each other."""

    name: str
    groups: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        most, *others = sorted(self.groups, key=len, reverse=True)
        deviating = sorted(rank for group in others for rank in group)
        if len(most) == 1:
            return f"{_shown_ranks(sorted([*most, *deviating]))} differ in {self.name}"
        verb = "differs" if len(deviating) == 1 else "differ"
        return f"{_shown_ranks(deviating)} {verb} from {_shown_ranks(list(most))} in {self.name}"


def find_differences(processes: Processes, values: Values) -> list[Difference]:
    """Return what is not the same on all ranks, in the order of rank zero's values; the same list on every rank.

    Ranks exchange one digest. The values themselves travel only if the digests differ.
    """
    if processes.world_size == 1:
        return []
    digest = hashlib.sha256(repr(list(values.items())).encode()).digest()
    digests = processes.gather(digest)
    if all(other == digests[0] for other in digests):
        return []
    everyone = processes.gather(dict(values))
    names = dict.fromkeys(name for one in everyone for name in one)
    found = [Difference(name, _groups([one.get(name, "missing") for one in everyone])) for name in names]
    return [difference for difference in found if len(difference.groups) > 1]


def _groups(values: list[Hashable]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks that have equal values."""
    ranks: dict[Hashable, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return tuple(tuple(group) for group in ranks.values())


def _shown_ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
