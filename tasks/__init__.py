"""SeqIO tasks, one module for each source of text pairs."""
