"""What can be known about an experiment from outside, read from its files; nothing here imports torch."""
