"""What a process needs in its environment to have the simulated device."""

from __future__ import annotations

from pathlib import Path

SIMULATED = {"PYTHONPATH": str(Path(__file__).parent / "site")}
