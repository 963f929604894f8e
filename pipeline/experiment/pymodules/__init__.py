"""The Python modules of an experiment: loaded, checked against their contracts, put into typed values."""
