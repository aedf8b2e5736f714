"""Attention over paged KV: one protocol, one backend a file."""
