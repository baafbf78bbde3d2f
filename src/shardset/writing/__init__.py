"""Shards as they are written: tars, and the conversion of folders of loose files into indexed shards."""
