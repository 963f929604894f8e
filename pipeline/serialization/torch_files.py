"""Files of tensors, wherever they come from: read without running code or filling the memory."""

from __future__ import annotations

import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import torch

from pipeline.errors import UsageError
from pipeline.serialization.npz_files import opened_archive, reported_as_unreadable
from pipeline.serialization.tensor_pickles import check_pickle
from pipeline.system.files import regular_size

SAFETENSORS = ".safetensors"


def load_weights(path: Path) -> Any:
    """Read a file of weights of either kind; safetensors files hold nothing but tensors by name."""
    return load_safetensors(path) if path.suffix == SAFETENSORS else load_tensors(path)


def load_tensors(path: Path, opened: BinaryIO | None = None) -> Any:
    """Read a file of tensors and plain values on the CPU; raise UnreadableFile for one that is not safe to read.

    ``opened`` is the same file where it is open already: its name may lead elsewhere by now.
    """
    with opened_archive(path, "tensors written by torch.save", opened) as (file, archive):
        _check_tensors(archive)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)


def load_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of a safetensors file on the CPU; raise UnreadableFile for one that is not safe to read."""
    read = safetensors_package(path).load_file
    with reported_as_unreadable(path, "tensors written by safetensors"):
        # safetensors compares the header with the file before it allocates anything. It would wait for a pipe.
        regular_size(path)
        tensors: dict[str, torch.Tensor] = read(path, device="cpu")
        return tensors


def safetensors_package(path: Path) -> Any:
    """Return the optional package that reads and writes safetensors files."""
    try:
        return import_module("safetensors.torch")
    except ImportError:
        raise UsageError(
            f"{path} needs the package safetensors, which is not installed.",
            "pip install 'training-pipeline[safetensors]'",
        ) from None


def _check_tensors(archive: zipfile.ZipFile) -> None:
    # torch takes the folder of the first entry for the folder of all, and finds entries in any case of letters.
    names = archive.namelist()
    folder = names[0].split("/")[0]
    prefix = f"{folder}/data/"
    if [name for name in names if name.lower() == f"{folder}/data.pkl".lower()] != [f"{folder}/data.pkl"]:
        raise ValueError("it is not such a file")
    sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
    storages = {name.removeprefix(prefix): size for name, size in sizes.items() if name.startswith(prefix)}
    check_pickle(archive.read(f"{folder}/data.pkl"), storages)
