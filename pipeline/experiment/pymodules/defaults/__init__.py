"""The pymodules that stand for those an author leaves out: copied as they are into the frozen copy.

Only files that an author could have written belong here; they import nothing but ``pipeline.components``.
"""
