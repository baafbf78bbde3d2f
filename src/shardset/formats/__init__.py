"""Bytes: pure functions on buffers and on ``read(offset, length)``. Nothing here knows a network or a dataset."""
