"""Parts of clients/bench/methods_table.py: what a run came to by category, and how it is shown."""
