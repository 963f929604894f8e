"""Past steps, run again and looked at: what replay and verify-resume need beyond their arguments."""
