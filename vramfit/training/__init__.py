"""How a run is done."""
