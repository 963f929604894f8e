"""One file per helper verb."""
