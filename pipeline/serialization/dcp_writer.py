"""Writing folders of shards with torch's distributed checkpoint.

Imported only where modules are sharded: torch takes half as long again to start with it.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save

from pipeline.distributed.processes import Processes
from pipeline.errors import PipelineError
from pipeline.serialization.shard_index import FORMAT, Keys, parse_index
from pipeline.serialization.sharded_files import INDEX, VALUES, file_sizes, split_state
from pipeline.system.disk import Disk, bytes_writer


def save_shards(states: Mapping[Path, dict[str, Any]], processes: Processes) -> None:
    """Write states into folders together with all other ranks, each its own pieces; an error of one is an error of all.

    What rank zero does alone comes last: no rank may leave while others still write together.
    """
    split = {folder: split_state(state) for folder, state in states.items()}
    for folder, (tensors, _) in split.items():
        _check_names(folder, tensors)
    written = {folder: _write_pieces(folder, tensors, processes) for folder, (tensors, _) in split.items()}
    for folder, (tensors, values) in split.items() if processes.is_rank_zero else ():
        index = _index(written[folder], {_name(keys): keys for keys in tensors})
        Disk().write(folder / INDEX, bytes_writer(index))
        Disk().write(folder / VALUES, partial(torch.save, values))
        _check_complete(folder, index)


def _name(keys: Keys) -> str:
    return ".".join(map(str, keys))


def _check_names(folder: Path, tensors: Mapping[Keys, torch.Tensor]) -> None:
    if len({_name(keys) for keys in tensors}) < len(tensors):
        raise PipelineError(
            f"The keys of the state of {folder.name} must be different for each of its tensors, but two are equal."
        )


def _write_pieces(folder: Path, tensors: Mapping[Keys, torch.Tensor], processes: Processes) -> Metadata:
    named = {_name(keys): tensor for keys, tensor in tensors.items()}
    # What is not sharded is the same on every rank, or should be rank zero's.
    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            is_alone = processes.world_size == 1
            writer = FileSystemWriter(folder)
            metadata: Metadata = save(named, storage_writer=writer, planner=planner, no_dist=is_alone)
            return metadata
    except CheckpointException as error:
        raise _refusal(folder, error) from error


def _check_complete(folder: Path, index: bytes) -> None:
    """What other machines have written must be seen here as well: a commit is made of what is seen."""
    try:
        parse_index(index, file_sizes(folder))
    except ValueError as error:
        raise PipelineError(
            f"Could not save {folder}: {error}. The last commit is intact.\n"
            "  fix: let all machines mount the data home without caching names, then run again with --auto."
        ) from error


def _refusal(folder: Path, error: CheckpointException) -> PipelineError:
    rank, (reason, _) = next(iter(error.failures.items()))
    first_line = (str(reason) or type(reason).__name__).splitlines()[0]
    return PipelineError(
        f"Could not save {folder} on rank {rank}: {first_line}. The last commit is intact.\n"
        "  fix: free space or restore access, then run again with --auto."
    )


def _index(metadata: Metadata, paths: Mapping[str, Keys]) -> bytes:
    """Return an index of what torch has just written; ``paths`` are the places of the tensors by name."""
    shapes = {
        (name, tuple(chunk.offsets)): list(chunk.sizes)
        for name, tensor in metadata.state_dict_metadata.items()
        if isinstance(tensor, TensorStorageMetadata)
        for chunk in tensor.chunks
    }
    pieces: dict[str, list[list[Any]]] = {name: [] for name in paths}
    for index, info in metadata.storage_data.items():
        offsets = tuple(index.offset)
        pieces[index.fqn].append(
            [list(offsets), shapes[index.fqn, offsets], info.relative_path, info.offset, info.length]
        )
    entries = [_entry(path, metadata.state_dict_metadata[name], pieces[name]) for name, path in paths.items()]
    return (json.dumps({"format": FORMAT, "tensors": entries}) + "\n").encode()


def _entry(path: Keys, tensor: Any, pieces: list[list[Any]]) -> dict[str, Any]:
    dtype = str(tensor.properties.dtype).removeprefix("torch.")
    # A process that has nothing of a tensor does not take part.
    pieces = sorted(piece for piece in pieces if math.prod(piece[1]))
    return {"path": list(path), "dtype": dtype, "shape": list(tensor.size), "pieces": pieces}
