"""Building blocks of the models: linear, norm, rotary, attention, mlp, embedding. Plain torch, inference only."""
