"""Operations on rows of logits, and the choice between XLA and Pallas kernels for operations that have both."""
