"""The Python modules of an experiment: loaded, checked against their contracts, put into typed values.

What must fit across several of them is judged in ``checks``, not here.
"""
