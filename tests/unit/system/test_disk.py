"""Changes of the file system: atomic, digested, and never through a link."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import PipelineError
from pipeline.store.changes import Changes
from pipeline.system.disk import Digest, Disk, bytes_writer, json_writer


def test_digest_of_a_write_is_that_of_the_file(tmp_path: Path) -> None:
    """What was written is what is promised to be there."""
    content = os.urandom(3_000_000)
    digest = Disk().write(tmp_path / "x", bytes_writer(content))
    assert digest == Digest.of(tmp_path / "x") == Digest(len(content), sha256(content).hexdigest())
    assert digest.sha256 == hashlib.sha256(content).hexdigest()


def test_write_never_overwrites(tmp_path: Path) -> None:
    """A committed file is never opened for writing again."""
    (tmp_path / "x").write_text("old")
    with pytest.raises(PipelineError, match="Could not create"):
        Disk().write(tmp_path / "x", bytes_writer(b"new"))
    assert (tmp_path / "x").read_text() == "old"


def test_replacing_leaves_no_staging_file(tmp_path: Path) -> None:
    """The new content is there under the old name, even if an older attempt was left behind."""
    (tmp_path / "x").write_text("old")
    (tmp_path / "staging").write_text("torn")
    Disk().replace_file(tmp_path / "x", json_writer({"a": 1}), tmp_path / "staging")
    assert json.loads((tmp_path / "x").read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_full_disk_is_reported_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed write names the file and says that the last commit is intact."""

    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(PipelineError, match="No space left on device") as raised:
        Disk().write(tmp_path / "weights.pt", bytes_writer(b"x"))
    assert "weights.pt" in str(raised.value)
    assert "--auto" in str(raised.value)


def test_removing_a_tree_never_follows_links(tmp_path: Path) -> None:
    """A link inside a results folder loses its name, not its target."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").touch()
    (tmp_path / "results").mkdir()
    (tmp_path / "results/link").symlink_to(tmp_path / "precious")
    Disk().remove_tree(tmp_path / "results")
    assert not (tmp_path / "results").exists()
    assert (tmp_path / "precious/file").exists()


def test_link_shares_storage(tmp_path: Path) -> None:
    """A pool that equals another costs no space."""
    (tmp_path / "a").write_text("x")
    Disk().link(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").samefile(tmp_path / "b")


def test_link_is_a_copy_where_there_are_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems without hard links get the content twice."""

    def unsupported(*arguments: Any) -> None:
        raise OSError(errno.EPERM, "not supported")

    monkeypatch.setattr(os, "link", unsupported)
    (tmp_path / "a").write_text("x")
    Disk().link(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "x"


def test_changes_are_added_up() -> None:
    """Two sets of changes make one commit."""
    left, right = Changes({"a": bytes_writer(b"")}, removed={"x"}), Changes({"b": bytes_writer(b"")}, removed={"y"})
    both = left | right
    assert set(both.files) == {"a", "b"}
    assert both.removed == {"x", "y"}
