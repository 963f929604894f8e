"""The experiment as written: settings, pymodules, cross-checks, assembly, initial weights, persisted parts."""
