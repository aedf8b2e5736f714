"""Side by side with other engines: prepare -> engines in environments of their own -> rounds -> report."""
