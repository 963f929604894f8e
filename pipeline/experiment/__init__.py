"""From an author's files to an assembled experiment, with every check. Nothing here trains or writes results."""
