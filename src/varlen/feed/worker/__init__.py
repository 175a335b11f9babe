"""What makes batches ahead of the trainer: a process with a ring of shared memory, or a thread."""
