"""Engines: where the units of a run are computed. Each one knows a cluster; none knows what a unit is made of."""
