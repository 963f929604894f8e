"""The command line: what excludes what, who speaks, and what flags stand for."""

from __future__ import annotations

import os
from itertools import combinations
from unittest.mock import patch

import pytest

from pipeline.arguments import AUTO, RESET, RESUME, START, parse_arguments

MODES = ("--resume", "--reset", "--auto")


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what a refused command line prints."""
    with pytest.raises(SystemExit) as ending:
        parse_arguments(list(words))
    assert ending.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("pair", combinations(MODES, 2))
def test_modes_exclude_one_another(capsys: pytest.CaptureFixture[str], pair: tuple[str, str]) -> None:
    """Two of the three flags together are bad usage."""
    assert "not allowed with" in refusal(capsys, "tiny", *pair)


@pytest.mark.parametrize(
    ("words", "mode"), [([], START), (["--resume"], RESUME), (["--reset"], RESET), (["--auto"], AUTO)]
)
def test_flag_is_the_mode(words: list[str], mode: str) -> None:
    """Each flag is one mode, and no flag is a plain start."""
    assert parse_arguments(["tiny", *words]).mode == mode


def test_set_is_refused_with_resume_and_tells_how_to_make_a_variant(capsys: pytest.CaptureFixture[str]) -> None:
    """A resumed experiment runs with its frozen copy, so nothing can be set."""
    message = refusal(capsys, "tiny", "--resume", "--set", "training.seed=1")
    assert "--set" in message
    assert "new VARIANT --from tiny --set training.seed=1" in message


@pytest.mark.parametrize("mode", [[], ["--reset"], ["--auto"]])
def test_set_is_kept_in_order_when_starting(mode: list[str]) -> None:
    """Several --set are taken in the order in which they were given."""
    words = ["tiny", *mode, "--set", "training.seed=1", "--set", "training.seed=2"]
    assert parse_arguments(words).overrides == ("training.seed=1", "training.seed=2")


def test_help_shows_two_examples_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """--help ends with exit code 0 and tells how to begin and what the codes mean."""
    with pytest.raises(SystemExit) as ending:
        parse_arguments(["--help"])
    text = capsys.readouterr().out
    examples = [line for line in text.splitlines() if line.strip().startswith("torchrun ")]
    assert ending.value.code in (0, None)
    assert len(examples) == 2
    assert all(f"{code} " in text.partition("exit codes:")[2] for code in (0, 1, 2, 3))


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["a", "b"],
        ["a", "--unknown"],
        ["a", "--res"],
        ["../a"],
        [""],
        ["a", "--stop-after-epoch", "-1"],
        ["a", "--stop-after-epoch", "x"],
        ["a", "--set"],
    ],
    ids=str,
)
def test_bad_usage_ends_with_code_two(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    """Every wrong command line gets the usage and one sentence, without a stack trace."""
    message = refusal(capsys, *words)
    assert message.startswith("usage: training_pipeline.py")
    assert "Traceback" not in message


@patch.dict(os.environ, {"RANK": "1"})
@pytest.mark.parametrize("words", [["a", "--unknown"], ["--help"]])
def test_other_ranks_print_nothing(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    """Under torchrun every process parses the line, but rank zero alone speaks."""
    with pytest.raises(SystemExit):
        parse_arguments(words)
    assert capsys.readouterr() == ("", "")


@patch.dict(os.environ, {"RANK": "0"})
def test_rank_zero_prints_under_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    """Rank zero tells what is wrong for all."""
    assert "--unknown" in refusal(capsys, "a", "--unknown")


def test_flags_are_short_for_settings() -> None:
    """--deterministic and --no-validate are overrides, and come after those given by --set."""
    arguments = parse_arguments(["a", "--deterministic", "--no-validate", "--set", "training.seed=1"])
    expected = ("training.seed=1", "training.deterministic=true", "training.evaluation_interval=0")
    assert arguments.all_overrides == expected


def test_without_flags_nothing_is_overridden() -> None:
    """A plain command line changes no settings."""
    assert parse_arguments(["a"]).all_overrides == ()


def test_stop_after_epoch_zero_is_meant() -> None:
    """Stopping after the first evaluation is a wish, not the absence of one."""
    assert parse_arguments(["a", "--stop-after-epoch", "0"]).stop_after_epoch == 0
    assert parse_arguments(["a"]).stop_after_epoch is None
