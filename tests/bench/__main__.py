"""Speed against a hand-written loop: ``python -m tests.bench [--rounds N]``.

All contenders are alive at once and train epochs in turn. The hand-written loop takes part twice, so that
the ratio between its two copies shows how much of a difference is noise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.bench import experiment, history, stall
from tests.bench.work import KINDS, WORLD_SIZE

ROOT = Path(__file__).parents[2]
GOALS = {"tiny": 0.80, "compute": 0.98, "convolutions": 0.98}
PIPELINES = {"pipeline": [], "exact": ["--set", "training.gradient_reduction=exact"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", nargs="+", choices=[*KINDS, "stall", "history"], help="measure only these")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    arguments = parser.parse_args()
    rounds = f"{arguments.rounds} rounds, {WORLD_SIZE} processes"
    titles = {kind: f"{KINDS[kind]['steps']} steps a round, {rounds}" for kind in KINDS}
    titles |= {"stall": "a commit of weights and AdamW state, one process", "history": "a commit inside a long epoch"}
    measures: dict[str, Callable[[int], dict[str, str]]] = {kind: partial(measure, kind) for kind in KINDS}
    measures |= {"stall": stall.measure, "history": history.measure}
    results = {}
    for kind in arguments.only or titles:
        results[kind] = measures[kind](arguments.rounds)
        print(f"\n{kind}: {titles[kind]}")
        for name, value in results[kind].items():
            print(f"  {name:44} {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


def measure(kind: str, rounds: int) -> dict[str, str]:
    """Let the contenders train in turn and return what was measured."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for name in PIPELINES:
            experiment.write(home, name, kind, rounds + 1)
        hand_written = ["-m", "tests.bench.hand_written", kind, str(rounds + 1)]
        entry = [str(ROOT / "training_pipeline.py"), "--data-home", str(home)]
        lines = {"plain": hand_written, "plain_again": hand_written}
        lines |= {name: [*entry, name, *flags] for name, flags in PIPELINES.items()}
        started, processes = {}, {}
        for contender, line in lines.items():
            start = time.perf_counter()
            processes[contender] = _launch(home, contender, line)
            _wait_for(home / f"{contender}.ready", processes[contender])
            started[contender] = time.perf_counter() - start
        for _ in range(rounds + 1):
            for contender in lines:
                (home / "turn.new").write_text(contender)
                (home / "turn.new").rename(home / "turn")
                _wait_for(home / "turn", processes[contender], gone=True)
        for process in processes.values():
            process.wait(120)
        return _facts(home, kind, started)


def _launch(home: Path, contender: str, line: list[str]) -> subprocess.Popen[bytes]:
    variables = {"BENCH_FOLDER": str(home), "BENCH_NAME": contender, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={WORLD_SIZE}"]
    with (home / f"{contender}.txt").open("w") as output:
        return subprocess.Popen([*torchrun, *line], env={**os.environ, **variables}, stdout=output, stderr=output)


def _wait_for(path: Path, process: subprocess.Popen[bytes], *, gone: bool = False) -> None:
    while path.exists() == gone:
        if process.poll() is not None:
            raise SystemExit(f"a contender died:\n{''.join(file.read_text() for file in path.parent.glob('*.txt'))}")
        time.sleep(0.02)


def _facts(home: Path, kind: str, started: dict[str, float]) -> dict[str, str]:
    rounds = {
        name: [json.loads(line) for line in (home / f"{name}.jsonl").read_text().splitlines()[1:]] for name in started
    }
    steps = KINDS[kind]["steps"]
    rate = {name: statistics.median(steps / one["seconds"] for one in facts) for name, facts in rounds.items()}
    return {
        "steps/s, hand-written": f"{rate['plain']:.1f}",
        "steps/s, hand-written again (noise)": f"{rate['plain_again']:.1f}",
        "steps/s, pipeline": f"{rate['pipeline']:.1f}",
        f"pipeline / hand-written (goal {GOALS[kind]:.2f})": _ratio(rounds, "pipeline", "seconds"),
        "hand-written again / hand-written (noise)": _ratio(rounds, "plain_again", "seconds"),
        "pipeline / hand-written, by CPU time": _ratio(rounds, "pipeline", "cpu"),
        "a step with exact / with fast (goal 1.25)": _ratio(rounds, "pipeline", "seconds", "exact"),
        "the same, by CPU time": _ratio(rounds, "pipeline", "cpu", "exact"),
        "ms a step, pipeline": f"{1000 / rate['pipeline']:.2f}",
        "launch to first step, hand-written": f"{started['plain']:.2f} s",
        "launch to first step, pipeline": f"{started['pipeline']:.2f} s",
        "peak memory of a process, hand-written": f"{rounds['plain'][-1]['memory']} MB",
        "peak memory of a process, pipeline": f"{rounds['pipeline'][-1]['memory']} MB",
        "peak memory of a process, exact": f"{rounds['exact'][-1]['memory']} MB",
    }


def _ratio(rounds: dict[str, list[dict[str, float]]], name: str, field: str, of: str = "plain") -> str:
    """Return the median over rounds of one contender's time in units of another's, and the middle half of them."""
    pairs = zip(rounds[of], rounds[name], strict=True)
    ratios = sorted(one[field] / other[field] for one, other in pairs)
    low, _, high = statistics.quantiles(ratios, n=4)
    return f"{statistics.median(ratios):.3f}  (middle half {low:.3f} … {high:.3f})"


if __name__ == "__main__":
    main()
