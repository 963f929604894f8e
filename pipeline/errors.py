"""Every error a user is meant to read, and the exit code it ends in.

PipelineError            1  something failed while running
├── DamagedResults       1  committed files do not match their digests
├── UnreadableFile       1  a file of tensors or arrays is not safe to read
├── RanksDiffer          1  what must be the same on every rank is not
├── InvalidExperiment    2  settings, pymodules or their combination are wrong
│   └── UsageError       2  the command line itself is wrong
└── StateConflict        3  results exist, are missing, or are in use
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where, what must hold and was found instead, and what to do."""

    where: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" + (f"\n    fix: {self.fix}" if self.fix else "")


class PipelineError(Exception):
    """A failure with a message for the user; shown without a stack trace.

    ``is_shared``: every process has it, so that rank 0 alone reports it.
    """

    exit_code = 1
    is_shared = False

    def shared(self) -> PipelineError:
        self.is_shared = True
        return self


class DamagedResults(PipelineError):
    """Committed files do not match their digests and nothing intact is left to continue from."""


class UnreadableFile(PipelineError):
    """A file of tensors or arrays is damaged, or would do more than hold values when it is read."""


class RanksDiffer(PipelineError):
    """Weights, states or decisions that must be the same on every rank are not."""


class InvalidExperiment(PipelineError):
    """The experiment cannot run as it is written; carries every problem found, not the first only."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(problems)

    def __str__(self) -> str:
        listed = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1))
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        return f"The experiment cannot run: {count}.\n{listed}"


class UsageError(InvalidExperiment):
    """The command line asks for something that does not exist or contradicts itself."""

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__([Problem("command line", what, fix)])
        self.args = (what, fix)

    def __str__(self) -> str:
        problem = self.problems[0]
        return problem.what + (f"\n  fix: {problem.fix}" if problem.fix else "")


class StateConflict(PipelineError):
    """What is on disk does not allow what was asked."""

    exit_code = 3


def nearest(word: str, known: Sequence[str]) -> str:
    """Return ' Did you mean …?' for the closest known word, or nothing."""
    close = get_close_matches(word, known, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
