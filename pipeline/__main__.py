"""``python -m pipeline VERB``: helpers around a training run."""

from __future__ import annotations

import argparse
import sys

from pipeline.commands import new, status
from pipeline.errors import PipelineError

_VERBS = {"new": new, "status": status}


def main(words: list[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m pipeline", description=__doc__, allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, verb in _VERBS.items():
        summary = str(verb.__doc__).splitlines()[0]
        verb.add_arguments(
            verbs.add_parser(
                name,
                help=summary,
                description=summary,
                epilog=verb.EXAMPLE,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    arguments = parser.parse_args(words)
    try:
        return int(_VERBS[arguments.verb].execute(arguments))
    except PipelineError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
