"""What a commit holds: each persisted part, how it is saved, and how it is restored.

The store below writes the files; nothing here decides when they become current.
"""
