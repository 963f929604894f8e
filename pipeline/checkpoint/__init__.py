"""What a commit holds: each persisted part, how it is saved, and how it is restored. The store below writes it."""
