"""The report: one page about an experiment, written without torch."""
