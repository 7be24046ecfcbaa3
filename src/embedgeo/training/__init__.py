"""Measuring while a model trains: the monitor, and a callback for each trainer."""
