"""How processes are started: torchrun lines, background launches, Slurm scripts. Nothing here trains."""
