"""What must survive: preparation, lock, status, store, provenance."""
