"""Draft heads from disk: one module per published layout, each giving the names of models/heads/tensors.py."""
