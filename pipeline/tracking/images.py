"""Images in the logs: one PNG file for each picture of each evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, unquote


class ImageFolder:
    """Keeps pictures where trackers find them again after a kill, and people at any time.

    They are written before the commit of their evaluation, so readers ask for committed epochs only. An
    evaluation that is done again overwrites its pictures.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, epoch: int, pictures: Mapping[str, bytes]) -> None:
        """Keep pictures by dataset and name; each file is there as a whole or not at all."""
        for name, png in pictures.items():
            dataset, _, title = name.partition("/")
            target = self._folder / dataset / quote(title, safe="") / f"epoch_{epoch}.png"
            target.parent.mkdir(parents=True, exist_ok=True)
            staging = target.with_suffix(".tmp")
            staging.write_bytes(png)
            staging.replace(target)

    def read(self, epoch: int) -> dict[str, bytes]:
        """Return the pictures of an epoch by dataset and name."""
        files = sorted(self._folder.glob(f"*/*/epoch_{epoch}.png"))
        return {f"{file.parts[-3]}/{unquote(file.parts[-2])}": file.read_bytes() for file in files}
