"""Stages: steps, batches, losses, buffers, evaluation. They compute, and never see a path."""
