"""Commands in what the program prints, and a shell to paste them into."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.support.running import SECONDS, environment

ROOT = Path(__file__).parents[2]
# From the first word of a command to the end of its line, without a remark behind four spaces.
COMMAND = re.compile(
    r"(?:PYTHONPATH=\S+ )?[^\s:;]*(?:python3?|torchrun|training-pipeline) (?:.*?)(?=    \(|$)", re.MULTILINE
)
PLACEHOLDERS = {"VARIANT": "variant_1", "NAME": "name_1", "EXAMPLE": "example_1"}


def commands_of(text: str) -> list[str]:
    """Return the commands that a message prints, with names in place of the words that stand for one."""
    lines = []
    for line in COMMAND.findall(text):
        if "-m pipeline" in line or "training_pipeline" in line or "training-pipeline" in line:
            for word, name in PLACEHOLDERS.items():
                line = re.sub(rf"\b{word}\b", name, line)
            lines.append(line.strip())
    return lines


def paste(line: str, folder: Path = ROOT, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a line in a shell, as someone who copies it does."""
    return subprocess.run(
        line, shell=True, cwd=folder, env=environment(env), capture_output=True, text=True, timeout=SECONDS, check=False
    )
