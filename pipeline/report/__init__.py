"""The report: one page about an experiment, read from its files. It never imports torch or code of an experiment."""
