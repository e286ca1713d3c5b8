"""T5 encoder and decoder stacks in flax.linen, written for sentence embeddings."""
