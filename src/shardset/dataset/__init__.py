"""Shards and their indexes as one dataset: discovery, samples by number and by key."""
