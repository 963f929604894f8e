"""The documentation, and the tools that write parts of it."""
