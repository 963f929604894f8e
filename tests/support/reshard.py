"""Reads folders of shards on one number of processes and writes them again: ``python -m tests.support.reshard``."""

from __future__ import annotations

import sys
from pathlib import Path

from torch import nn
from torch.optim import AdamW

from pipeline.checkpoint.snapshots import target_in
from pipeline.distributed.processes import Processes
from pipeline.experiment.pymodules.definitions import ModuleDefinition
from pipeline.experiment.settings.settings import TrainingSettings
from pipeline.experiment.sharding import mesh_of, shard_module
from pipeline.serialization.dcp_writer import save_shards
from pipeline.serialization.sharded_files import load_shards
from pipeline.worker import exit_now


def trunk() -> nn.Module:
    """Return the trunk of the tiny experiment."""
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))


def reshard(data: Path, target: Path, processes: Processes) -> None:
    """Load the trunk and its optimizer as a run would, and write both below another folder."""
    module = trunk()
    mesh = mesh_of(processes, TrainingSettings(parallelism="fsdp"))
    if mesh is not None:
        shard_module(ModuleDefinition(module), mesh)
    optimizer = AdamW([{"name": "trunk", "params": module.parameters()}])
    module.load_state_dict(load_shards(data / "module_ckps/last/trunk", target_in(module)))
    optimizer.load_state_dict(load_shards(data / "optim_ckps/trunk", target_in(optimizer)))
    states = {"module_ckps/last/trunk": module.state_dict(), "optim_ckps/trunk": optimizer.state_dict()}
    save_shards({target / path: state for path, state in states.items()}, processes)


if __name__ == "__main__":
    reshard(Path(sys.argv[1]), Path(sys.argv[2]), Processes.join())
    exit_now(0)
