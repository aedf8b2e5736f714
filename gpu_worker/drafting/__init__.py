"""Drafters: every method proposes a DraftTree; verification knows nothing else of them."""
