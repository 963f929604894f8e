"""Files of tensors, wherever they come from: read without running code or filling the memory."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from pipeline.runtime.safe_archives import opened_archive
from pipeline.runtime.tensor_pickles import check_pickle


def load_tensors(path: Path) -> Any:
    """Read a file of tensors and plain values on the CPU; raise UnreadableFile for one that is not safe to read."""
    with opened_archive(path, "tensors written by torch.save") as (file, archive):
        _check_tensors(archive)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)


def _check_tensors(archive: zipfile.ZipFile) -> None:
    # torch takes the folder of the first entry for the folder of all, and finds entries in any case of letters.
    names = archive.namelist()
    folder = names[0].split("/")[0]
    prefix = f"{folder}/data/"
    if [name for name in names if name.lower() == f"{folder}/data.pkl".lower()] != [f"{folder}/data.pkl"]:
        raise ValueError("it is no such file")
    sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
    storages = {name.removeprefix(prefix): size for name, size in sizes.items() if name.startswith(prefix)}
    check_pickle(archive.read(f"{folder}/data.pkl"), storages)
