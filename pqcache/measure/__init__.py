"""What a machine can do and what a decode step must move."""
