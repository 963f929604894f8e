"""Speed against a hand-written loop and its peers: ``python -m benchmarks [--rounds N] [--only …] [--json FILE]``.

Contenders are alive at once and train epochs in turn, or are started in turn where the start is what counts. The
hand-written loop takes part twice, so that the ratio between its two copies shows how much of a difference is noise.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks import disk_use, features, history, large_state, stall, throughput
from benchmarks.driver import PEERS
from benchmarks.rows import Row, as_text

_PACKAGES = {"lightning": "lightning", "accelerate": "accelerate", "ignite": "pytorch-ignite", "mmengine": "mmengine"}
_NOTE = (
    "All are ratios to the hand-written loop's, unless a row says otherwise: the median over the rounds and, in\n"
    "brackets, the middle half of them. «by hand again» is the same loop a second time: what differs there is noise."
)
# Kinds of work are short and noisy, starts and large states long.
_SECTIONS: dict[str, tuple[Callable[[int], list[Row]], float]] = {
    "tiny": (partial(throughput.measure, "tiny"), 2.0),
    **{kind: (partial(throughput.measure, kind), 1.0) for kind in throughput.KINDS_OF_WORK if kind != "tiny"},
    **{kind: (partial(features.measure, kind), 1.0) for kind in features.FEATURES},
    "start": (large_state.start, 0.5),
    "large": (large_state.measure, 0.35),
    "stall": (stall.measure, 0.5),
    "pools": (disk_use.measure, 1.0),
    "history": (history.measure, 1.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", nargs="+", choices=list(_SECTIONS), help="measure only these")
    parser.add_argument("--without-peers", action="store_true", help="only the hand-written loop and ours")
    parser.add_argument("--json", type=Path, help="also write all numbers here")
    arguments = parser.parse_args()
    # As all contenders: what is measured in this process shall not depend on the machine's cores.
    torch.set_num_threads(1)
    if arguments.without_peers:
        PEERS.clear()
    rows = []
    for name in arguments.only or _SECTIONS:
        act, share = _SECTIONS[name]
        found = act(max(2, round(share * arguments.rounds)))
        print(f"\n{name}:\n{as_text(found)}", flush=True)
        rows += found
    print(f"\n{as_text(rows)}\n\n{_NOTE}\n{_versions()}")
    if arguments.json:
        content = {"versions": _versions(), "rounds": arguments.rounds, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(content, indent=1, default=str) + "\n")


def _versions() -> str:
    names = ["torch", "numpy", *(_PACKAGES[name] for name in PEERS)]
    packages = ", ".join(f"{name} {version(name)}" for name in names)
    return f"Python {platform.python_version()}, {packages}, {platform.machine()}"


if __name__ == "__main__":
    main()
