"""gRPC in, scheduler messages out, token events back as text deltas."""
