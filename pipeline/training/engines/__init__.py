"""Engines turn the batches of a step into one update, the same on all ranks.

Each owns what depends on how gradients are reduced.
"""
