"""The ranks of one run: rendezvous, collectives, peer monitor and comparison. Nothing here knows experiments."""
