"""``training-pipeline VERB``: everything around a training run, and the run itself."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Protocol, cast

from pipeline.arguments import VERSION, RankZeroParser, add_home_options
from pipeline.errors import PipelineError, nearest
from pipeline.requirements import check_requirements
from pipeline.verbs import VERBS

_DESCRIPTION = "Everything around a training run, and the run itself."


class _Verb(Protocol):
    """What every file of ``commands/`` defines."""

    EXAMPLE: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    execute: Callable[[argparse.Namespace], int]


def main(words: list[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    check_requirements()
    try:
        return _run_verb(sys.argv[1:] if words is None else words)
    except PipelineError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except (BrokenPipeError, KeyboardInterrupt):
        # The reader of a pipe has closed it; what is still buffered must not be tried again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 130


def _run_verb(words: list[str]) -> int:
    # Behind "--" are flags of a training run, which the verb's own parser must not see.
    split = words.index("--") if "--" in words else len(words)
    flags = words[split + 1 :]
    words = words[:split]
    if words and not words[0].startswith("-") and words[0] not in VERBS:
        print(f"No verb {words[0]!r}; there are {', '.join(VERBS)}.{nearest(words[0], list(VERBS))}", file=sys.stderr)
        return 2
    parser = RankZeroParser(prog="training-pipeline", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=VERSION)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, summary in VERBS.items():
        verb_parser = verbs.add_parser(
            name,
            help=summary,
            description=summary,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        # Only the verb that runs is imported: some need torch, which takes seconds.
        if name in words[:1]:
            verb_parser.epilog = _import_verb(name).EXAMPLE
            _import_verb(name).add_arguments(verb_parser)
            add_home_options(verb_parser)
    arguments, unknown = parser.parse_known_args(words, argparse.Namespace(flags=flags, takes_flags=False))
    if unknown:
        verbs.choices[arguments.verb].error(_explain_unknown(unknown, arguments))
    if flags and not arguments.takes_flags:
        parser.error(f"{arguments.verb} takes no flags of a training run behind '--'")
    return _import_verb(arguments.verb).execute(arguments)


def _explain_unknown(unknown: list[str], arguments: argparse.Namespace) -> str:
    message = f"unrecognized arguments: {' '.join(unknown)}"
    if arguments.takes_flags:
        message += f". Options of the training run stand behind two dashes: {arguments.verb} … -- {' '.join(unknown)}"
    name = unknown[0].removeprefix("--")
    if hasattr(arguments, "set") and not hasattr(arguments, name):
        message += f". To change a parameter: --set parameters.{name}=VALUE"
    return message


def _import_verb(verb: str) -> _Verb:
    return cast(_Verb, import_module(f"pipeline.commands.{verb.replace('-', '_')}"))


if __name__ == "__main__":
    sys.exit(main())
