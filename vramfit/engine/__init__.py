"""How a step is done."""
