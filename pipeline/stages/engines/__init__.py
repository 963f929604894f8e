"""The ways of reducing a step's gradients over the processes, one file each."""
