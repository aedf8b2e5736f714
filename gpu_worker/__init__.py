"""The worker: owns device memory, executes step plans (draft, verify, accept, publish, catch up)."""
