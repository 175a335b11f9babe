"""Numbers to tables and pictures; this room takes plain figures and knows nothing of how they came about."""
