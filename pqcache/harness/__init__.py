"""Runs methods on tasks: configuration, models, the lm-eval adapter, resumable cells, rows, tables and figures."""

import warnings

# In a notebook without ipywidgets tqdm draws its bars as text, as it should, and warns about it once per kernel.
warnings.filterwarnings("ignore", "IProgress not found")
