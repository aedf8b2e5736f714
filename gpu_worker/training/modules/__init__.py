"""Draft heads as torch modules for training: the same arithmetic as the serving heads, under the same names."""
