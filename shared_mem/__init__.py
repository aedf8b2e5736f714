"""The records, rings and doorbells between the scheduler and its workers; imports nothing of ours."""
