"""``python -m docs.pictures``: trains the example, kills it, resumes it, and takes pictures of what is seen."""

from __future__ import annotations

import tempfile
from pathlib import Path

from docs.pictures.session import ROOT, Session
from tests.support.browser import Browser

PICTURES = ROOT / "docs/pictures"
TRAIN = "torchrun --nproc-per-node=2 training_pipeline.py"
WEIGHTS = "data/module_ckps/best/backbone.pt"
STEPS = r"Epoch\(val\) \[[0-3]\]|Epoch\(train\) \[4\]\[20"


def main() -> None:
    with tempfile.TemporaryDirectory() as name, Browser() as browser:
        folder = Path(name)
        session = Session(folder)
        session.run("training-pipeline new my_digits", "nothing")
        session.run_and_kill(f"{TRAIN} my_digits", f"processes:|steps:|{STEPS}", "Epoch(train) [4][20/34]")
        session.run("training-pipeline status my_digits", r"killed|committed|best|^  [a-z]+_")
        session.run(f"{TRAIN} my_digits --resume", r"state:|\[5\]\[20|val\) \[1[45]\]|finished|best:")
        session.run(f"training-pipeline new never_killed && {TRAIN} never_killed", "finished|best:")
        session.run(f'cmp experiment_results/{{my_digits,never_killed}}/{WEIGHTS} && echo "the same bits"')
        (folder / "session.html").write_text(session.page())
        browser.look(960, 200)
        browser.open(folder / "session.html")
        browser.picture(PICTURES / "session.png", whole=True)
        browser.look(1000)
        browser.open(folder / "experiment_logs/my_digits/report.html")
        browser.look(1000, browser.ask("Math.ceil(shared.charts[3].node.getBoundingClientRect().bottom) + 9"))
        browser.settle()
        browser.picture(PICTURES / "report.png")


if __name__ == "__main__":
    main()
