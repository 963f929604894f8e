"""Constant parameters in the results: files that are written once, and which of their values still hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from pipeline.checkpoint.committed_files import CommittedFiles
from pipeline.checkpoint.snapshots import Snapshots
from pipeline.distributed.checksums import checksums
from pipeline.experiment.assembly import Experiment
from pipeline.experiment.constant_parameters import (
    Record,
    Tensors,
    check_rebuilt,
    constant_names,
    select,
    source_name,
)
from pipeline.experiment.initial_weights import describe_source
from pipeline.store.changes import Changes
from pipeline.store.weight_pools import CONSTANT_FILE, CONSTANT_RECORD, constant_path
from pipeline.system.disk import json_writer


class _Bits(NamedTuple):
    """What a tensor was when it was written; the bits of two tensors are compared by their checksums."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    checksum: int


class Constants:
    """The parameters of each module that were written once, and what their values were.

    Other files of a module leave out those that have their value still, however a change would come about: by an
    optimizer after a parameter was unfrozen, or by assignment. Results that began without such files have none.
    """

    def __init__(self, experiment: Experiment, *, copies: bool) -> None:
        self._experiment = experiment
        self._copies = copies
        self._written: dict[str, dict[str, _Bits]] = {}
        self._begun: Changes | None = None

    def begin(self) -> Changes:
        """Choose the constant parameters of a fresh experiment, the first time, and return their files."""
        if self._begun is None:
            self._begun = self._choose()
        return self._begun

    def _choose(self) -> Changes:
        modules = self._experiment.components.modules
        training = self._experiment.settings.training
        # Of their own: these copies are not needed after the first commit.
        snapshots = Snapshots(copies=self._copies)
        changes = Changes()
        for name, constant in constant_names(self._experiment.components, training).items():
            origin = source_name(modules, name)
            source = modules[origin]
            tensors = select(source.module, constant)
            self._written[name] = _bits(tensors)
            kind = CONSTANT_RECORD if source.saves_trained_only else CONSTANT_FILE
            path = constant_path(name, kind)
            if origin != name:
                # An average begins as its source.
                changes.same_as[path] = constant_path(origin, kind)
            elif source.saves_trained_only:
                record = Record.of(describe_source(name, source, training), tensors)
                changes.files[path] = json_writer(record.as_json())
            else:
                others = set(source.module.state_dict()) - set(constant)
                changes.files[path], size = snapshots.take(f"module {name}", source.module, left_out=others)
                changes.num_bytes += size
        return changes

    def unchanged(self, module: str) -> set[str]:
        """Return the parameters of a module whose values are still those that were written once."""
        written = self._written.get(module, {})
        now = _bits(select(self._experiment.components.all_modules[module], written)) if written else {}
        return {name for name, bits in now.items() if bits == written[name]}

    def load(self, module: str, files: CommittedFiles) -> Mapping[str, torch.Tensor]:
        """Return the constant parameters of a module as they were written or, if a record stands for them, rebuilt."""
        constants: Tensors | None = files.read_constants(module)
        if constants is None:
            record = files.read_record(module)
            if record is None:
                return {}
            rebuilt = self._experiment.components.all_modules[module]
            constants = check_rebuilt(module, rebuilt, Record.from_json(record), self._experiment.folder)
        self._written[module] = _bits(constants)
        return constants


def _bits(tensors: Tensors) -> dict[str, _Bits]:
    sums = checksums(list(tensors.values()))
    return {
        name: _Bits(tuple(tensor.shape), tensor.dtype, checksum)
        for (name, tensor), checksum in zip(tensors.items(), sums, strict=True)
    }
