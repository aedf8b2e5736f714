"""Python client of a Draftline service."""
