"""A real session at a terminal: every line was printed by the command above it."""

from __future__ import annotations

import html
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.running import environment, family, send

ROOT = Path(__file__).parents[2]
_WIDTH = 116
_PAGE = """<!DOCTYPE html><meta charset="utf-8"><style>
body {{ margin: 0; background: #15181c; }}
pre {{ margin: 0; padding: 18px 22px; color: #d5dade; font: 13px/1.5 "DejaVu Sans Mono", monospace; }}
b {{ color: #6fd39c; }} i {{ color: #77818b; font-style: normal; }} em {{ color: #f0c674; font-style: normal; }}
</style><pre>{}</pre>"""


class Session:
    """Runs commands in a folder and writes down what was typed and what came back."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lines = folder, list[str]()
        (folder / "training_pipeline.py").symlink_to(ROOT / "training_pipeline.py")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment = environment({"PATH": path, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"})

    def run(self, command: str, wanted: str = ".") -> None:
        """Run a command to its end; of its output, only lines that match ``wanted`` are written down."""
        self._type(command)
        output, _ = self._start(command).communicate(timeout=600)
        self._show(output, wanted)

    def run_and_kill(self, command: str, wanted: str, kill_at: str) -> None:
        """Run a command in the background and kill all of its processes once it has printed ``kill_at``."""
        self._type(f"{command} &")
        process, output = self._start(command), ""
        assert process.stdout is not None
        while kill_at not in output and process.poll() is None:
            output += process.stdout.readline()
        pids = family(process.pid)
        for pid in pids:
            send(pid, signal.SIGKILL)
        process.wait(60)
        self._show(output, wanted)
        self._type(f"kill -9 {' '.join(map(str, pids))}")

    def _start(self, command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-c", command],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _type(self, command: str) -> None:
        self._lines.append(f"<b>$</b> {html.escape(command)}")

    def _show(self, output: str, wanted: str) -> None:
        """Write down the lines that are wanted; dots stand for those between them."""
        was_left_out = False
        for line in output.splitlines():
            if not re.search(wanted, line):
                was_left_out = True
                continue
            if was_left_out:
                self._lines.append("<i>…</i>")
            was_left_out = False
            self._lines.append(_coloured(line))

    def page(self) -> str:
        """Return the session as a page that looks like a terminal."""
        return _PAGE.format("\n".join(self._lines))


def _coloured(line: str) -> str:
    cut = line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…"
    dimmed = re.sub(r"^(\S+ \S+ - \S+ - INFO - )", r"<i>\1</i>", html.escape(cut))
    return re.sub(r"(state: continues.*|finished after.*|best: .*|the same bits)", r"<em>\1</em>", dimmed)
