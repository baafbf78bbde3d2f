"""Where samples are: the index of one shard, its sidecar file, and the catalog of a whole dataset."""
