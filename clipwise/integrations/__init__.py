"""Where people already train: several processes, Transformers, Lightning. Each file needs its own package only."""
