"""The life of an experiment on disk around its training: which mode applies, the frozen copy, starts, reset, finish.

Commits belong to ``store``; here nothing is written during training.
"""
