"""The errors that a user reads, with their exit codes.

PipelineError            1  something failed while running
├── DamagedResults       1  committed files do not match their digests
├── UnreadableFile       1  a file of tensors or arrays is not safe to read
├── RanksDiffer          1  values that must be the same on every rank are not
├── BrokenContract       1  an author's function returned what it must not return
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
    """One problem: where it is, what must hold and was found instead, and what to do about it."""

    where: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" + (f"\n    fix: {self.fix}" if self.fix else "")


class PipelineError(Exception):
    """A failure with a message for the user, shown without a stack trace.

    ``is_shared``: all ranks raise the same error, so that rank 0 alone reports it.
    """

    exit_code = 1
    is_shared = False

    def shared(self) -> PipelineError:
        """Mark the error as raised by all ranks, and return it."""
        # An attribute of the instance, so that it survives pickling on the way to other ranks.
        self.is_shared = True
        return self


class DamagedResults(PipelineError):
    """Committed files do not match their digests and nothing intact is left to continue from."""


class UnreadableFile(PipelineError):
    """A file of tensors or arrays is damaged, or contains more than values, for example code."""


class RanksDiffer(PipelineError):
    """Weights, states or decisions that must be the same on every rank are not."""


class BrokenContract(PipelineError):
    """An author's function returned something that its contract does not allow."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(problem)

    def __str__(self) -> str:
        return str(self.problem)


class InvalidExperiment(PipelineError):
    """The experiment cannot run as it is written. Holds all problems that were found, not only the first."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        # Ranks send errors to each other: pickle calls the class with the arguments of Exception.__init__.
        super().__init__(problems)

    def __str__(self) -> str:
        listed = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1))
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        return f"The experiment cannot run: {count}.\n{listed}"


class UsageError(InvalidExperiment):
    """The command line asks for something that does not exist or contradicts itself."""

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__([Problem("command line", what, fix)])
        # As above: pickle must call this class with its own arguments, not with those of its base.
        self.args = (what, fix)

    def __str__(self) -> str:
        problem = self.problems[0]
        return problem.what + (f"\n  fix: {problem.fix}" if problem.fix else "")


class StateConflict(PipelineError):
    """The state of the results on disk does not allow the requested action."""

    exit_code = 3


def nearest(word: str, known: Sequence[str]) -> str:
    """Return " Did you mean …?" with the closest known word, or an empty string if none is close."""
    close = get_close_matches(word, known, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
