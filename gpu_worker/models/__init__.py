"""Model families: configuration, the interface the model runner calls, one folder per family."""
