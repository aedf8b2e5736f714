"""Training of draft heads: synthesize -> extract -> fit -> evaluate; serving never imports it."""
