"""The commands of `python -m vramfit`, one file each: `add_arguments(parser)` and `run(options)`."""
