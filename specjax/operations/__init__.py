"""Operations on rows of logits and on packed calls, and the choice between XLA and Pallas kernels, where both exist."""
