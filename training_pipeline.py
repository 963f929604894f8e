"""Entry of a training run, alone or under torchrun; see ``--help``."""

from __future__ import annotations

from pipeline.arguments import parse_arguments
from pipeline.command_lines import has_launcher
from pipeline.system.stop_requests import end_with_launcher


def main(words: list[str] | None = None) -> int:
    """Run an experiment and return its exit code."""
    arguments = parse_arguments(words)
    # As early as possible: torchrun may be killed while torch is being imported.
    if has_launcher():
        end_with_launcher()
    # Imported late, because torch takes seconds and a wrong command line should be refused at once.
    from pipeline.worker import run_worker

    return run_worker(arguments)


if __name__ == "__main__":
    code = main()
    from pipeline.worker import exit_now

    exit_now(code)
