"""What fits shardset into other frameworks; each module needs the extra of its name."""
