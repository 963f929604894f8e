"""Agreement of ranks: compares named values that must be the same on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from pipeline.distributed.processes import Processes

Values = Mapping[str, Hashable]


@dataclass(frozen=True)
class Difference:
    """A value that is not the same on every rank: its name, and the groups of ranks with equal values."""

    name: str
    groups: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        majority, *others = sorted(self.groups, key=len, reverse=True)
        deviating = sorted(rank for group in others for rank in group)
        # If no two ranks agree, a majority does not exist.
        if len(majority) == 1:
            return f"{_list_ranks(sorted([*majority, *deviating]))} differ in {self.name}"
        verb = "differs" if len(deviating) == 1 else "differ"
        return f"{_list_ranks(deviating)} {verb} from {_list_ranks(list(majority))} in {self.name}"


def find_differences(processes: Processes, values: Values) -> list[Difference]:
    """Return the values that differ between ranks, in the order of rank 0's values; the same list on every rank."""
    if processes.world_size == 1:
        return []
    # One digest per rank is enough as long as all agree, which is nearly always. Only otherwise the values travel.
    digest = hashlib.sha256(repr(list(values.items())).encode()).digest()
    digests = processes.gather(digest)
    if all(other == digests[0] for other in digests):
        return []
    values_by_rank = processes.gather(dict(values))
    # A dict keeps the order of the names and drops repeated ones, which a set would not do.
    names = dict.fromkeys(name for rank_values in values_by_rank for name in rank_values)
    differences = []
    for name in names:
        ranks_by_value: dict[Hashable, list[int]] = {}
        for rank, rank_values in enumerate(values_by_rank):
            ranks_by_value.setdefault(rank_values.get(name, "missing"), []).append(rank)
        if len(ranks_by_value) > 1:
            differences.append(Difference(name, tuple(tuple(group) for group in ranks_by_value.values())))
    return differences


def _list_ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
