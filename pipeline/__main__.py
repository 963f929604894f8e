"""``python -m pipeline VERB``: helpers around a training run."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import Any

from pipeline.errors import PipelineError

_VERBS = {
    "new": "Write a settings folder that trains as it is.",
    "status": "Show how far experiments have come, without touching them.",
    "report": "Write one HTML page about one or several experiments, at any time.",
    "fsck": "Verify every digest of an experiment's results and say what to do about damage.",
    "verify-resume": "Prove on an experiment of your own that a killed and resumed run gives the same bits.",
    "replay": "Rebuild one past step exactly: its items, losses and gradient norms.",
}


def main(words: list[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    words = sys.argv[1:] if words is None else words
    parser = argparse.ArgumentParser(prog="python -m pipeline", description=__doc__, allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, summary in _VERBS.items():
        own = verbs.add_parser(
            name, help=summary, description=summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        # Only the verb that runs is imported: some need torch, which takes seconds.
        if name in words[:1]:
            own.epilog = _module(name).EXAMPLE
            _module(name).add_arguments(own)
    arguments = parser.parse_args(words)
    try:
        return int(_module(arguments.verb).execute(arguments))
    except PipelineError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _module(verb: str) -> Any:
    return import_module(f"pipeline.commands.{verb.replace('-', '_')}")


if __name__ == "__main__":
    sys.exit(main())
