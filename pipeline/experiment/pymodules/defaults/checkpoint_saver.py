"""Weights are kept of the start, of the best epoch and of the last one."""

from pipeline.components import BaseCheckpointSaver

checkpoint_saver = BaseCheckpointSaver()
