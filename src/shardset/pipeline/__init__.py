"""The streaming pipeline of the WebDataset convention: shards in, samples through stages, out."""
