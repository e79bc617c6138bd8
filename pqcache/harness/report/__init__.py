"""Rows, statistics, tables and figures."""
