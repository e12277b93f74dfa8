"""What will happen, by arithmetic alone: pure functions, no torch, no files, no clock."""
