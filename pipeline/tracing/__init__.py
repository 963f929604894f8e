"""Past steps, run again, recorded and compared: what replay and verify-resume need beyond their arguments."""
