"""Loaders: from a dataset to what a training loop takes."""
