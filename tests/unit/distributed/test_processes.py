"""One process without torchrun is a group of one."""

from __future__ import annotations

import os
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from pipeline.distributed import processes
from pipeline.distributed.peer_monitor import PeerMonitor
from pipeline.distributed.processes import Processes, is_lost_peer, is_silent_peer
from pipeline.errors import StateConflict


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


@pytest.mark.parametrize("act", ["on_rank_zero", "on_all_ranks"])
def test_refusal_is_marked_as_shared(act: str) -> None:
    """Every rank has the refusal, so that rank 0 alone reports it."""
    with pytest.raises(StateConflict) as raised:
        getattr(Processes(), act)(refuse)
    assert raised.value.is_shared


@pytest.mark.parametrize("act", ["on_rank_zero", "on_all_ranks"])
def test_other_exceptions_are_left_as_they_are(act: str) -> None:
    """A bug is not a refusal: it ends its own process with a traceback."""
    with pytest.raises(ZeroDivisionError):
        getattr(Processes(), act)(lambda: 1 / 0)


@pytest.mark.parametrize("act", ["on_rank_zero", "on_all_ranks"])
def test_answer_comes_back(act: str) -> None:
    """What an action returns is what every rank gets."""
    assert getattr(Processes(), act)(lambda: 42) == 42


@pytest.mark.parametrize(("count", "expected"), [("0", False), ("1", True), ("7", True)])
def test_restart_by_torchrun_is_known(count: str, expected: bool) -> None:
    """Processes that torchrun has restarted continue instead of starting over."""
    with patch.dict(os.environ, {"TORCHELASTIC_RESTART_COUNT": count}):
        assert Processes().was_restarted is expected


def test_lost_peer_is_distinguished_from_a_bug() -> None:
    """Only what the other process's end causes counts as its loss."""
    assert is_lost_peer(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"))
    assert is_lost_peer(RuntimeError("Application timeout caused pair closure"))
    assert not is_lost_peer(RuntimeError("shapes do not match"))
    assert not is_lost_peer(ValueError("Connection closed by peer"))


def test_silent_peer_is_distinguished_from_one_that_ended() -> None:
    """A timeout must not be reported as a crash of another process."""
    assert is_silent_peer(RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 15000ms for recv"))
    assert not is_silent_peer(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"))
    assert not is_silent_peer(TimeoutError("timed out waiting"))


def test_first_of_all_processes_is_found_by_their_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two processes that fail together one reports; one that gets no answer reports as well."""
    store = dist.HashStore()
    first, second = (Processes(rank, 2, store=store) for rank in range(2))
    assert (first.is_first("to fail"), second.is_first("to fail")) == (True, False)
    assert second.is_first("to miss another")
    with patch.object(dist.HashStore, "add", side_effect=RuntimeError("gone")):
        assert second.is_first("to fail")
    monkeypatch.setattr(processes, "_MAX_SECONDS_TO_ASK", 0.1)
    with patch.object(dist.HashStore, "add", side_effect=lambda *words: time.sleep(10)):
        assert second.is_first("to fail")


def test_processes_of_one_machine_are_watched_on_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a kernel waits for a lost peer without an end; on CPUs gloo itself reports one."""
    watches = []
    monkeypatch.setattr(PeerMonitor, "start", lambda monitor, *_: watches.append(monitor._watches_processes))
    for kind in ("cuda", "cpu"):
        Processes(0, 2, torch.device(kind), dist.HashStore()).watch_peers(print)
    assert watches == [True]
