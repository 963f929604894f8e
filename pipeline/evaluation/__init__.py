"""What evaluate and export need beyond their arguments."""
