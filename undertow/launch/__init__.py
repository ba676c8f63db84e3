"""What starts a run on machines: the plan of it, what speaks against it, and the command or script."""
