"""Campaigns of faults against real runs: ``python -m tests.crash kills|lives|ranks|signals [--nproc N] …``.

    kills    SIGKILL of everything, half of the time at random instants and half of the time inside a write
    lives    SIGKILL of everything at any instant of a life, from the start of its first process to its end
    ranks    single processes killed, frozen or orphaned, in every phase, in a random order
    signals  all ways of being asked to stop, in a random order

Every campaign is compared with runs that nobody disturbed. The seed makes it repeatable, up to the machine's timing.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tests.crash.campaign import Campaign
from tests.crash.experiment import check_same, prepare
from tests.crash.scenarios import Victim, rank_scenarios, signal_scenarios
from tests.support.running import run_process


def main() -> int:
    """Run a campaign and return 1 if anything failed."""
    arguments = _parse()
    folder = Path(tempfile.mkdtemp(prefix=f"crash_{arguments.kind}_", dir=arguments.folder))
    table = _kill(arguments, folder) if arguments.kind in ("kills", "lives") else _live_through(arguments, folder)
    for name, value in table.items():
        print(f"  {name.replace('_', ' '):24} {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=1) + "\n")
    if table["passed"]:
        shutil.rmtree(folder)
    else:
        print(f"Failed with --seed {arguments.seed}; all that was left is in {folder}.", file=sys.stderr)
    return 0 if table["passed"] else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["kills", "lives", "ranks", "signals"])
    parser.add_argument("--nproc", type=int, default=2, help="processes of each run")
    parser.add_argument("--kills", type=int, default=100, help="how many kills to survive")
    parser.add_argument(
        "--times", type=int, default=1, help="how often to go through all scenarios of ranks or signals"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--set", action="append", default=[], metavar="training.KEY=VALUE", help="a setting of the experiment"
    )
    parser.add_argument("--folder", type=Path, help="where to run; the system's temporary folder otherwise")
    parser.add_argument("--json", type=Path, help="also write the table here")
    return parser.parse_args()


def _training(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what the campaign's experiment has in training.json beside its own."""
    pairs = (word.removeprefix("training.").partition("=") for word in arguments.set)
    return {key: _json_or_text(text) for key, _, text in pairs}


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _kill(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    anywhere = arguments.kind == "lives"
    campaign = Campaign(folder, arguments.nproc, arguments.seed, training=_training(arguments), anywhere=anywhere)
    with tqdm(total=arguments.kills, desc=f"kills at {arguments.nproc} processes", unit="kill") as bar:
        try:
            for _ in campaign.run(arguments.kills):
                bar.update()
        except AssertionError as error:
            campaign.table.problems.append(str(error))
    return campaign.table.as_json()


def _live_through(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Let experiments live through all scenarios in a random order, as many as fit into each."""
    undisturbed = folder / "undisturbed"
    prepare(undisturbed, **_training(arguments))
    assert run_process(undisturbed, nproc=arguments.nproc).returncode == 0
    find = {"ranks": rank_scenarios, "signals": signal_scenarios}[arguments.kind]
    draw, scenarios, problems, rounds = random.Random(arguments.seed), [], [], 0
    for _ in range(arguments.times):
        scenarios += draw.sample(found := find(arguments.nproc), len(found))
    with tqdm(scenarios, desc=f"{arguments.kind} at {arguments.nproc} processes", unit="scenario") as bar:
        waiting = iter(bar)
        while bar.n < len(scenarios):
            rounds += 1
            try:
                victim = Victim(folder / f"round_{rounds}", arguments.nproc)
                prepare(victim.home, **_training(arguments))
                _round(victim, waiting, undisturbed)
            except AssertionError:
                problems.append(traceback.format_exc())
    facts = {"processes": arguments.nproc, "seed": arguments.seed, "scenarios": len(scenarios), "rounds": rounds}
    return {**facts, "finals_bit_identical": rounds - len(problems), "problems": problems, "passed": not problems}


def _round(victim: Victim, waiting: Iterator[Any], undisturbed: Path) -> None:
    while victim.has_room and (scenario := next(waiting, None)):
        scenario(victim)
    victim.finish()
    check_same(undisturbed, victim.home)


if __name__ == "__main__":
    sys.exit(main())
