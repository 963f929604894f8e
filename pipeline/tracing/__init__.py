"""Past steps, run again, recorded and compared: what replay and verify-resume need beyond their arguments.

It works in scratch folders and never writes to an experiment.
"""
