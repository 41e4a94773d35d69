"""What T5X's Python users import and our own code does not need."""
