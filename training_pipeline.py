"""Entry of a training run, alone or under torchrun; see ``--help``."""

from __future__ import annotations

from pipeline.arguments import has_launcher, parse_arguments
from pipeline.system.stop_requests import end_with_launcher


def main(words: list[str] | None = None) -> int:
    """Run an experiment and return an exit code that tells the truth."""
    arguments = parse_arguments(words)
    if has_launcher():
        end_with_launcher()
    # Only a valid command line is worth the seconds that importing torch takes.
    from pipeline.worker import run_worker

    return run_worker(arguments)


if __name__ == "__main__":
    code = main()
    from pipeline.worker import exit_now

    exit_now(code)
