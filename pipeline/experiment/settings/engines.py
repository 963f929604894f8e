"""The table of engines: how gradients are added, and what everything else asks about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class EngineKind:
    """One row: the class of an engine, and what its choice means for the rest of an experiment."""

    # Imported only when a run needs it: this table must not need torch.
    implementation: str
    # Whether bits do not depend on the number of processes.
    is_exact: bool = False
    # Whether every process holds a shard of each module.
    is_sharded: bool = False
    # Values of other keys of training.json that it does not work with, and why.
    excludes: Mapping[tuple[str, object], str] = field(default_factory=dict)


_ORDER = "in an order that depends on the number of processes"
# A new engine is one row here and the file that the row names.
ENGINES = {
    "fast": EngineKind("pipeline.training.engines.ddp:DdpEngine"),
    "exact": EngineKind(
        "pipeline.training.engines.exact:ExactEngine",
        is_exact=True,
        excludes={
            ("sync_batchnorm", True): f"torch adds those statistics {_ORDER}",
            ("on_rank_difference", "broadcast"): (
                "a rank that is overwritten has computed other bits before, which exact promises not to happen"
            ),
        },
    ),
    "fsdp": EngineKind(
        "pipeline.training.engines.fsdp:FsdpEngine",
        is_sharded=True,
        excludes={
            ("gradient_reduction", "exact"): f"torch adds the gradients of shards {_ORDER}",
            ("sync_batchnorm", True): "its layers were not tried inside modules that are sharded",
        },
    ),
}


def keys_of_engines() -> dict[str, str]:
    """Return, for each engine, the key of training.json that chooses it."""
    return {name: "parallelism" if kind.is_sharded else "gradient_reduction" for name, kind in ENGINES.items()}
