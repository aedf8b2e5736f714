"""Owns every request and every KV page; plans steps for the workers. CPU only."""
