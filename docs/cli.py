"""``python -m docs.cli``: writes the reference of the command line, ``docs/reference/cli.md``, from the parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from pipeline import arguments
from pipeline.commands import status
from pipeline.verbs import VERBS

COMMAND = "python -m docs.cli"
PAGE = Path(__file__).parent / "reference/cli.md"
TRAINING = "training_pipeline.py"
# Every command has these. They are described once, in a section of their own.
COMMON = ("--data-home", "--results-home", "--help")
# The group by which a verb says that it takes options of a training run.
_FLAGS = "-- FLAGS"
_HEAD = f"""\
# Command line

Every option, with the words of `--help`. `{COMMAND}` writes this page from the parsers: change those, not the page.
Each section ends with the page that shows how to use the command.

| command | does |
|---|---|
| [`training_pipeline.py`](#training_pipelinepy) | Train an experiment, alone or under torchrun. |
"""
_COMMON = """\
## Options of every command

| option | meaning |
|---|---|
| `--data-home DIR` | The [data home](run.md#data-home). Default: `$GORIDEEPSTYLE_DATA_HOME`, else the current folder. |
| `--results-home DIR` | Home of results and logs. Default: `$GORIDEEPSTYLE_RESULTS_HOME`, else the data home. |
| `--help`, `-h` | Show the options and examples. |

## Exit codes of every verb

| code | meaning |
|---|---|
| 0 | done |
| 1 | a failure: damaged results, a file that cannot be read, a full disk |
| 2 | a wrong command line, or an experiment that does not exist or is not valid |
| 3 | what is on disk does not allow it: something exists, is missing, or is in use |
| 130 | interrupted with Ctrl+C, or the reader of the output has gone |

The sections below say what a verb's codes mean where that is more precise.
"""


class Section(NamedTuple):
    """What the page says about a command beyond its parser: what its exit codes mean, and where it is explained."""

    exit_codes: dict[int, str]
    guide: str
    link: str


_TRAINING = Section(
    {
        0: "finished, nothing to do, or stopped on request and resumable",
        1: "anything that is not below: a crash, a full disk, a lost process, damaged results",
        2: "wrong command line, or an experiment that cannot run: settings, pymodules, or an edited frozen copy",
        3: "results exist, are missing, or are in use",
        130: "interrupted by a second Ctrl+C, or before anything was started",
    },
    "Run, stop and continue",
    "../how_to/run.md",
)
_RUN = ("Run, stop and continue", "../how_to/run.md")
_WRITE = ("Write and check an experiment", "../how_to/write_and_check.md")
_WATCH = ("Watch and compare runs", "../how_to/watch.md")
_USE = ("Evaluate and export", "../how_to/evaluate_and_export.md")
_VERIFY = ("Verify, replay and repair", "../how_to/verify_and_repair.md")
_SECTIONS = {
    "new": Section({0: "written", 2: "no such template or experiment", 3: "the experiment exists"}, *_WRITE),
    "check": Section({0: "no problems found", 2: "problems, or no such experiment"}, *_WRITE),
    "train": Section(
        {
            0: "finished, nothing to do, or stopped on request and resumable",
            1: "anything that is not below: a crash, a full disk, a lost process, damaged results",
            2: "wrong command line, or an experiment that cannot run",
            3: "results exist, are missing, or are in use",
            130: "interrupted by a second Ctrl+C, or before anything was started",
            128: "plus the number of a signal: a process was ended by it",
        },
        *_RUN,
    ),
    "run": Section({0: "started in the background; in front, the exit codes are those of `train`"}, *_RUN),
    "launch": Section(
        {
            0: "started",
            2: "a wrong command, or one of them cannot run",
            3: "one of them is running or waiting already, or its results do not fit the mode",
        },
        *_RUN,
    ),
    "slurm": Section(
        {
            0: "written or submitted",
            1: "refused by sbatch",
            2: "no such experiment, one that cannot run, no sbatch, or a wrong command",
            3: "it is running or waiting already",
        },
        "Slurm",
        "../how_to/slurm.md",
    ),
    "status": Section({}, *_WATCH),
    "logs": Section({0: "shown", 2: "no such experiment or process", 3: "there is no log yet"}, *_WATCH),
    "stop": Section(
        {
            0: "asked",
            2: "no such experiment",
            3: "no run is alive, or it is only just starting (without `--wait`)",
        },
        *_RUN,
    ),
    "compare": Section({0: "shown", 2: "no such experiment"}, *_WATCH),
    "clean": Section({0: "shown or deleted", 2: "no such experiment", 3: "a run is alive in it"}, *_VERIFY),
    "report": Section({0: "written", 2: "no such results, or a place that cannot be written"}, *_WATCH),
    "fsck": Section(
        {
            0: "nothing is damaged",
            1: "something is damaged, edited or replaced",
            2: "no such results",
            3: "a run is alive in them",
        },
        *_VERIFY,
    ),
    "verify-resume": Section(
        {0: "exact", 1: "not exact, or the run failed", 2: "no such experiment, or a wrong command"}, *_VERIFY
    ),
    "evaluate": Section(
        {
            0: "done",
            1: "damaged weights or a failure",
            2: "no such results, pool or points, or a wrong command",
            3: "the file exists",
        },
        *_USE,
    ),
    "export": Section(
        {
            0: "written",
            1: "damaged or unreadable weights",
            2: "no such source, or a wrong command",
            3: "the file exists",
        },
        *_USE,
    ),
    "replay": Section(
        {
            0: "rebuilt",
            1: "rebuilt but different from the record, or not possible",
            2: "no such results",
            3: "a run is alive in them",
        },
        *_VERIFY,
    ),
    "completion": Section({0: "printed"}, *_RUN),
}
# Several states have the same code, so that they are no part of the sections above.
_STATES = {
    "finished": "finished",
    "running": "running",
    "starting": "starting: a launched process or job has not opened the experiment yet",
    "waiting": "waiting until another experiment has finished, or in the queue of Slurm",
    "unfinished": "unfinished, and no run is alive",
    "new": "never started",
}


def page() -> str:
    """Return the page as the parsers say it now."""
    training = arguments._parser()
    parts = [
        _HEAD + "".join(f"| [`{verb}`](#{verb}) | {summary} |\n" for verb, summary in VERBS.items()),
        _COMMON,
        f"## {TRAINING}\n\n{training.description}\n",
        *_describe(f"torchrun --nproc-per-node=N {TRAINING}", training, _TRAINING),
    ]
    for verb, summary in VERBS.items():
        module = import_module(f"pipeline.commands.{verb.replace('-', '_')}")
        parser = argparse.ArgumentParser(epilog=module.EXAMPLE)
        module.add_arguments(parser)
        parts += [f"## {verb}\n\n{summary}\n", *_describe(f"training-pipeline {verb}", parser, _SECTIONS[verb])]
    return "\n".join(parts)


def _describe(command: str, parser: argparse.ArgumentParser, section: Section) -> Iterator[str]:
    """Yield what is known about one command: its usage, arguments, exit codes and examples."""
    positionals = [action for action in parser._actions if not action.option_strings]
    others = [action for action in parser._actions if action.option_strings]
    options = [action for action in others if action.option_strings[-1] not in COMMON]
    flags = next((str(group.description) for group in parser._action_groups if group.title == _FLAGS), "")
    usage = [command, *map(_usage, positionals), "[OPTIONS]" if options else "", f"[{_FLAGS}]" if flags else ""]
    yield f"```text\n{' '.join(filter(None, usage))}\n```\n"
    rows = [(f"`{_usage(action)}`", _meaning(action)) for action in positionals if action.help]
    rows += [(_spellings(action), _meaning(action)) for action in options]
    rows += [(f"`{_FLAGS}`", flags)] if flags else []
    yield _table("argument", rows)
    for group in parser._mutually_exclusive_groups:
        yield f"At most one of {', '.join(f'`{action.option_strings[-1]}`' for action in group._group_actions)}.\n"
    if not parser.allow_abbrev:
        yield "Options cannot be abbreviated.\n"
    codes = [(str(code), meaning) for code, meaning in section.exit_codes.items()]
    yield _table("exit code", codes) if codes else _table("with `--exit-code`", _states())
    # Commands of an epilog are indented; its headings and exit codes are not.
    examples = [line[2:] for line in (parser.epilog or "").splitlines() if line.startswith("  ")]
    yield "\n".join(["```bash", *examples, "```", ""])
    yield f"How to use it: [{section.guide}]({section.link}).\n"


def _table(heading: str, rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join([f"| {heading} | meaning |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows), ""])


def _usage(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest).replace("experiment", "EXP")
    shapes = {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} [{name} ...]"}
    return shapes.get(str(action.nargs), name)


def _spellings(action: argparse.Action) -> str:
    """Return all spellings of an option, the long one first and with its value."""
    long, *others = sorted(action.option_strings, key=len, reverse=True)
    name = str(action.metavar or ("{" + ",".join(action.choices) + "}" if action.choices else action.dest.upper()))
    values = {"0": "", "?": f" [{name}]", "+": f" {name} [{name} ...]"}
    return ", ".join([f"`{long}{values.get(str(action.nargs), f' {name}')}`", *(f"`{other}`" for other in others)])


def _meaning(action: argparse.Action) -> str:
    """Return the help of an argument, with what argparse knows besides."""
    text = str(action.help)
    if action.option_strings and action.required:
        text += "; required"
    if isinstance(action, argparse._AppendAction) and "repeatable" not in text:
        text += "; repeatable"
    if action.nargs == "?" and action.const is not None:
        text += f" (without a value: {action.const:g})"
    if isinstance(action.default, str) and action.default and "default" not in text:
        text += f" (default: {action.default})"
    return text


def _states() -> list[tuple[str, str]]:
    """Return the codes of ``status --exit-code``."""
    states = [(str(code), _STATES[state]) for state, code in status.EXIT_CODES.items()]
    return sorted([*states, ("2", "there is no such experiment")], key=itemgetter(0))


def main() -> None:
    PAGE.write_text(page())
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
