"""Every cross-check: what the files of an experiment say must fit together. A file's own contract is not part of it."""
