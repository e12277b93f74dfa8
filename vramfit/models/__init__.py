"""What is being trained."""
