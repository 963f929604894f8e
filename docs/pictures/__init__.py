"""The pictures of the README, made anew from real runs."""
