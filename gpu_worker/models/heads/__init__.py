"""Draft heads: small decoders over the target's hidden states (EAGLE-1/2/3, MTP), and Medusa's residual blocks."""
