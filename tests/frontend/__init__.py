"""Frontend and launcher, against a scripted scheduler: no torch, no model."""
