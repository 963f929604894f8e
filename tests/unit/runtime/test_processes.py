"""One process without torchrun is a group of one."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from pipeline.errors import StateConflict
from pipeline.runtime import processes
from pipeline.runtime.processes import Processes, _meeting_place, is_lost_peer


def refuse() -> None:
    """Refuse as a check would."""
    raise StateConflict("in use")


def test_alone_every_question_is_answered_without_communication() -> None:
    """A group of one gets its own values back."""
    alone = Processes()
    assert alone.is_rank_zero
    assert alone.broadcast("x") == "x"
    assert alone.gather("x") == ["x"]
    assert alone.sum(torch.ones(2)).tolist() == [1.0, 1.0]
    assert (alone.any(False), alone.any(True)) == (False, True)
    assert alone.backend == "none"


def test_without_torchrun_nothing_is_joined() -> None:
    """A plain python command is one process."""
    joined = Processes.join()
    assert (joined.rank, joined.world_size, joined.has_launcher) == (0, 1, False)


@pytest.mark.parametrize("act", ["on_rank_zero", "together"])
def test_refusal_is_marked_as_shared(act: str) -> None:
    """Every rank has the refusal, so that rank zero alone tells it."""
    with pytest.raises(StateConflict) as raised:
        getattr(Processes(), act)(refuse)
    assert raised.value.is_shared


@pytest.mark.parametrize("act", ["on_rank_zero", "together"])
def test_other_exceptions_are_left_as_they_are(act: str) -> None:
    """A bug is not a refusal: it ends its own process with a traceback."""
    with pytest.raises(ZeroDivisionError):
        getattr(Processes(), act)(lambda: 1 / 0)


@pytest.mark.parametrize("act", ["on_rank_zero", "together"])
def test_answer_comes_back(act: str) -> None:
    """What an action returns is what every rank gets."""
    assert getattr(Processes(), act)(lambda: 42) == 42


@pytest.mark.parametrize(("count", "expected"), [("0", False), ("1", True), ("7", True)])
def test_restart_by_torchrun_is_known(count: str, expected: bool) -> None:
    """Processes that torchrun has started again go on instead of starting over."""
    with patch.dict(os.environ, {"TORCHELASTIC_RESTART_COUNT": count}):
        assert Processes().was_restarted is expected


def test_lost_peer_is_told_from_a_bug() -> None:
    """Only what the other process's end causes counts as its loss."""
    assert is_lost_peer(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"))
    assert not is_lost_peer(RuntimeError("shapes do not match"))
    assert not is_lost_peer(ValueError("Connection closed by peer"))


@pytest.mark.parametrize(("num_launchers", "is_shared"), [("1", False), ("2", True)])
def test_restarted_processes_do_not_find_the_addresses_of_dead_ones(
    monkeypatch: pytest.MonkeyPatch, num_launchers: str, is_shared: bool
) -> None:
    """One torchrun keeps its store over restarts; several agree on a new one, but not on the number of restarts."""
    limit = timedelta(seconds=20)
    server = torch.distributed.TCPStore("localhost", 0, 1, is_master=True, timeout=limit, wait_for_workers=False)
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(server.port)}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": num_launchers}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    _meeting_place(limit).set("address", "of a process that was killed")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert _meeting_place(limit).check(["address"]) == is_shared


def test_first_of_all_processes_is_found_by_their_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two processes that fail together one speaks; one that cannot ask any more speaks as well."""
    store = dist.HashStore()
    first, second = (Processes(rank, 2, store=store) for rank in range(2))
    assert (first.is_first("to fail"), second.is_first("to fail")) == (True, False)
    assert second.is_first("to miss another")
    with patch.object(dist.HashStore, "add", side_effect=RuntimeError("gone")):
        assert second.is_first("to fail")
    monkeypatch.setattr(processes, "_SECONDS_OF_PATIENCE", 0.1)
    with patch.object(dist.HashStore, "add", side_effect=lambda *words: time.sleep(10)):
        assert second.is_first("to fail")
