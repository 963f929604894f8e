"""Components that survive: what they know is saved in a folder and loaded from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Stateful:
    """A component with state; one without state leaves both methods as they are."""

    def save(self, folder: Path) -> None:
        """Write all state into ``folder``, which exists and is empty.

        Called on rank zero for a commit, and on every rank after an evaluation and a resume: all must write the same.
        """

    def load(self, folder: Path) -> None:
        """Restore from ``folder`` what ``save`` wrote; called on every rank before a run continues."""


def save_json(folder: Path, state: dict[str, Any]) -> None:
    """Write ``state`` as ``state.json``; floats come back with the same bits."""
    (folder / "state.json").write_text(json.dumps(state, indent=1, sort_keys=True) + "\n")


def load_json(folder: Path) -> dict[str, Any]:
    """Read what ``save_json`` wrote."""
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return state
