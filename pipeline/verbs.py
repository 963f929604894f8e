"""The verbs of the console command, with a sentence for each. None of them can be the name of an experiment."""

from __future__ import annotations

# Each is a file of ``commands/``, with "_" for "-".
VERBS = {
    "new": "Write a settings folder that trains as it is.",
    "check": "Find everything that can be known to be wrong before training; writes nothing.",
    "train": "Train an experiment on one or several processes; kill it anywhere, run it again.",
    "run": "Check an experiment, then train it, here or in the background.",
    "launch": "Start experiments in the background, side by side or one after the other.",
    "slurm": "Write or submit a batch script for Slurm that continues until it is finished.",
    "status": "Show how far experiments have come, without touching them.",
    "logs": "Show or follow the log of an experiment.",
    "stop": "Ask a run to finish its step or epoch, commit and end.",
    "compare": "Show best and last values of experiments and the settings in which they differ.",
    "clean": "Show what could be freed, and free it if asked to; never what a resume needs.",
    "report": "Write one HTML page about one or several experiments, at any time.",
    "fsck": "Verify every digest of an experiment's results and say what to do about damage.",
    "verify-resume": "Prove on your own experiment that a killed and resumed run gives the same bits.",
    "evaluate": "Evaluate a split with committed weights, exactly, alone or under torchrun.",
    "export": "Put modules of experiments and of foreign files into one file of weights.",
    "replay": "Rebuild one past step exactly: its items, losses and gradient norms.",
    "completion": "Print what makes a shell complete verbs, options and names of experiments.",
}
