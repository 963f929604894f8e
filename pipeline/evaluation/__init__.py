"""What check, evaluate and export need beyond their arguments: batches tried, splits evaluated, modules exported.

Nothing here changes results.
"""
