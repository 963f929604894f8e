"""State of components: saved into a folder with every commit and loaded from it at a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# A JSON object whose keys are the component's choice.
ComponentState = dict[str, Any]


class Stateful:
    """A component that may have state; one without state does not override these methods."""

    def save(self, folder: Path) -> None:
        """Write all state into ``folder``, which exists and is empty.

        Called on rank 0 for a commit. Also called on every rank after an evaluation and after a resume, to compare the
        ranks: all must write the same.
        """

    def load(self, folder: Path) -> None:
        """Restore the state that ``save`` wrote into ``folder``; called on every rank before a run continues."""


def save_json(folder: Path, state: ComponentState) -> None:
    """Write ``state`` as ``state.json``; floats come back with the same bits."""
    # Sorted, so that equal states have equal bytes whatever the order in which they were built.
    (folder / "state.json").write_text(json.dumps(state, indent=1, sort_keys=True) + "\n")


def load_json(folder: Path) -> ComponentState:
    """Return the state that ``save_json`` wrote."""
    state: ComponentState = json.loads((folder / "state.json").read_text())
    return state
