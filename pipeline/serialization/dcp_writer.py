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

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save

from pipeline.distributed.processes import Processes
from pipeline.errors import PipelineError
from pipeline.serialization.shard_index import FORMAT, Keys, parse_index
from pipeline.serialization.sharded_files import INDEX, VALUES, StateDict, file_sizes, split_state
from pipeline.system.disk import Disk, bytes_writer


def save_shards(states: Mapping[Path, StateDict], processes: Processes) -> None:
    """Write states into folders together with all other ranks, each its own pieces; all ranks fail if one does."""
    split = {folder: split_state(state) for folder, state in states.items()}
    for folder, (tensors, _) in split.items():
        if len({_name(keys) for keys in tensors}) < len(tensors):
            raise PipelineError(
                f"The keys of the state of {folder.name} must be different for each of its tensors, but two are equal."
            )
    written = {folder: _write_pieces(folder, tensors, processes) for folder, (tensors, _) in split.items()}
    if not processes.is_rank_zero:
        return
    # What rank zero does alone comes last: no rank may leave while others still write together.
    for folder, (tensors, values) in split.items():
        index = _make_index(written[folder], {_name(keys): keys for keys in tensors})
        Disk().write(folder / INDEX, bytes_writer(index))
        Disk().write(folder / VALUES, partial(torch.save, values))
        # A commit is made of what rank zero sees, so what other machines have written must be seen here as well.
        try:
            parse_index(index, file_sizes(folder))
        except ValueError as error:
            raise PipelineError(
                f"Could not save {folder}: {error}. The last commit is intact.\n"
                "  fix: let all machines mount the data home without caching names, then run again with --auto."
            ) from error


def _name(keys: Keys) -> str:
    return ".".join(map(str, keys))


def _write_pieces(folder: Path, tensors: Mapping[Keys, torch.Tensor], processes: Processes) -> Metadata:
    """Let torch write the pieces of all ranks; return where they are."""
    named = {_name(keys): tensor for keys, tensor in tensors.items()}
    # A tensor that is not sharded is the same on every rank, or should be rank zero's.
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
        rank, (reason, _) = next(iter(error.failures.items()))
        first_line = (str(reason) or type(reason).__name__).splitlines()[0]
        raise PipelineError(
            f"Could not save {folder} on rank {rank}: {first_line}. The last commit is intact.\n"
            "  fix: free space or restore access, then run again with --auto."
        ) from error


def _make_index(metadata: Metadata, paths: Mapping[str, Keys]) -> bytes:
    """Return an index of what torch has just written; ``paths`` are the places of the tensors by name."""
    described = {}
    shapes = {}
    for name, tensor in metadata.state_dict_metadata.items():
        if isinstance(tensor, TensorStorageMetadata):
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            described[name] = {"path": list(paths[name]), "dtype": dtype, "shape": list(tensor.size)}
            shapes.update({(name, tuple(chunk.offsets)): list(chunk.sizes) for chunk in tensor.chunks})
    pieces: dict[str, list[tuple[list[int], list[int], str, int, int]]] = {name: [] for name in paths}
    for index, info in metadata.storage_data.items():
        offsets = tuple(index.offset)
        shape = shapes[index.fqn, offsets]
        # A rank that has nothing of a tensor writes an empty piece, which is not one.
        if math.prod(shape):
            pieces[index.fqn].append((list(offsets), shape, info.relative_path, info.offset, info.length))
    tensors = [{**described[name], "pieces": sorted(pieces[name])} for name in paths]
    return (json.dumps({"format": FORMAT, "tensors": tensors}) + "\n").encode()
