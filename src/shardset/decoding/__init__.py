"""From payloads to values: one registry of decoders for pipeline, loader and viewer."""
