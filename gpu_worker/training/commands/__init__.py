"""The subcommands of draftline-train: options, progress on the terminal, and the calls behind them."""
