"""The JSON settings: read, validated, typed. Nothing here imports torch or an experiment's Python code."""
