"""Building blocks that every model family shares. Plain torch, inference only."""
