"""What machine is this."""
