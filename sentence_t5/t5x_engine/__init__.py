"""This package's model, data and checkpoints as the objects that T5X asks for.

    t5x/train.py ─► gin file ─► engine.train ─► launch: our checks, T5X's hooks filled
      model        a t5x BaseModel around the encoder, the loss and the optimizer
      partitioner  T5X's PjitPartitioner on our mesh, by our rules
      data         our batches by step, as the iterators that T5X reads
      state        where the first weights come from, how T5X saves
      trainer      T5X's Trainer, reporting into metrics.jsonl as well
      evaluation   STS through T5X's inference functions

The same gin file, seed and mesh give the same weights, batches and losses as
``sentence_t5.train``. Needs t5x, which is not on PyPI: see ``docs/t5x.md``.
"""
