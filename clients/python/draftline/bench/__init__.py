"""Load generator of a Draftline service: workload -> load -> measure -> report (driven by runner)."""
