"""The machine: processes, randomness, durable files, signals, logs."""
