"""One HTML file that shows a folder of rows: `python run.py report=<folder>`."""
