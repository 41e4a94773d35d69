"""`t5x doctor`: checks whether a machine is ready, with a fix for everything that is not."""
