"""The transactional directory: manifest, generations, lock, commits, pools.

It sees paths and bytes, never a batch or a module.
"""
