"""The machine below one process: disk, files, logging, seeding, devices, signals.

Nothing here knows other ranks or experiments.
"""
