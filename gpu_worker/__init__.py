"""The worker: owns device memory, executes step plans (draft, verify, accept, publish, catch up)."""

import os

# Before torch loads its OpenMP runtime: threads that wait at a barrier sleep instead of spinning. On a machine whose
# cores are shared with the frontend, the scheduler and clients, a spinning thread takes the time slice that the
# thread it waits for needs; a step then costs several times as much.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
