"""What the hosted agent concludes from the processes that have failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from pipeline.launch.hosted_agent import _has_reported


def leave(folder: Path, rank: int, message: str) -> ProcessFailure:
    """Return the failure of a rank that has left a message, as a run leaves it."""
    file = folder / str(rank) / "error.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"message": {"message": message, "errorCode": 2, "extraInfo": {"timestamp": "1"}}}))
    return ProcessFailure(local_rank=rank, pid=1, exitcode=2, error_file=str(file))


@pytest.mark.parametrize(("said", "is_repeated"), [("no such key", True), ("boom", False)])
def test_message_that_a_visible_rank_has_printed_is_not_repeated(tmp_path: Path, said: str, is_repeated: bool) -> None:
    """All ranks refuse together, and the agent may see any of them end first."""
    leave(tmp_path, 0, "no such key")
    failure = leave(tmp_path, 1, said)
    assert _has_reported(failure, "0") is is_repeated


def test_rank_without_a_message_has_reported_nothing(tmp_path: Path) -> None:
    """It may have been killed."""
    failure = leave(tmp_path, 1, "boom")
    assert not _has_reported(failure, "0")
