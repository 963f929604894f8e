"""The ranks of one run: how they meet, communicate, watch and compare each other. Nothing here knows experiments."""
