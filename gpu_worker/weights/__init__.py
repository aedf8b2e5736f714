"""From a model's name to weights on the device, tokenizer files and facts."""
