"""From a model's name to weights on the device: resolve, open the checkpoint, load; tokenizer files and facts."""
