"""A training pipeline that cannot lose an experiment."""

__version__ = "0.2.0"
