"""The service side of Draftline: frontend, scheduler, launcher. Nothing here imports torch."""
